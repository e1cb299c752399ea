//! The sampling that a checkpoint recommends.

use serde_json::Value;

use crate::Sampling;

/// What `generation_config.json` says of sampling, and notes on what of it cannot be used.
pub(crate) fn sampling(config: Option<&Value>) -> (Sampling, Vec<String>) {
    let (mut sampling, mut notes) = (Sampling::default(), Vec::new());
    let Some(config) = config.filter(|config| config["do_sample"] != false) else {
        return (sampling, notes);
    };
    let mut number = |name: &str, valid: fn(f64) -> bool| {
        let said = &config[name];
        let found = said.as_f64().filter(|number| valid(*number));
        if found.is_none() && !said.is_null() {
            notes.push(format!(
                "generation_config.json recommends a {name} of {said}, which is ignored"
            ));
        }
        found
    };
    let temperature = number("temperature", |x| (0.0..=100.0).contains(&x));
    let top_k = number("top_k", |x| {
        (0.0..=f64::from(u32::MAX)).contains(&x) && x.fract() == 0.0
    });
    let top_p = number("top_p", |x| x > 0.0 && x <= 1.0);
    let min_p = number("min_p", |x| (0.0..=1.0).contains(&x));
    let repetition_penalty = number("repetition_penalty", |x| x > 0.0 && x <= 100.0);
    let filtered = [temperature, top_k, top_p, min_p].iter().any(Option::is_some);
    if filtered || config["do_sample"] == true {
        sampling.temperature = temperature.unwrap_or(1.0) as f32;
    }
    sampling.top_k = top_k.unwrap_or(0.0) as usize;
    sampling.top_p = top_p.unwrap_or(1.0) as f32;
    sampling.min_p = min_p.unwrap_or(0.0) as f32;
    sampling.repetition_penalty = repetition_penalty.unwrap_or(1.0) as f32;
    (sampling, notes)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_published_models_recommend_is_taken() {
        let config = json!({
            "bos_token_id": 248044, "do_sample": true, "eos_token_id": [248046, 248044],
            "temperature": 0.6, "top_k": 20, "top_p": 0.95
        });
        let (found, notes) = sampling(Some(&config));
        let expected = Sampling {
            temperature: 0.6,
            top_k: 20,
            top_p: 0.95,
            ..Sampling::default()
        };
        assert_eq!((found, notes), (expected, Vec::new()));
    }

    #[test]
    fn nothing_said_and_no_sampling_are_greedy() {
        let greedy = (Sampling::default(), Vec::new());
        assert_eq!(sampling(None), greedy);
        assert_eq!(sampling(Some(&json!({"eos_token_id": 1}))), greedy);
        let off = json!({"do_sample": false, "temperature": 0.7, "top_p": 0.8});
        assert_eq!(sampling(Some(&off)), greedy);
        assert_eq!(sampling(Some(&json!({"do_sample": true}))).0.temperature, 1.0);
        assert_eq!(sampling(Some(&json!({"top_p": 0.9}))).0.temperature, 1.0);
    }

    #[test]
    fn what_is_no_setting_is_ignored_and_told() {
        let config = json!({"temperature": "hot", "top_k": -1, "top_p": 1.5, "min_p": null, "repetition_penalty": 1.1});
        let (found, notes) = sampling(Some(&config));
        let expected = Sampling {
            repetition_penalty: 1.1,
            ..Sampling::default()
        };
        assert_eq!(found, expected);
        assert_eq!(notes.len(), 3, "{notes:?}");
        assert!(notes[0].contains("temperature of \"hot\""), "{notes:?}");
    }
}
