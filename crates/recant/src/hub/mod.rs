//! Repositories of the Hugging Face Hub, fetched into the cache that its other clients share.

mod download;
mod error;
mod fetch;
mod id;

use std::path::PathBuf;
use std::time::Duration;

pub use error::HubError;
use id::RepoId;

const ENDPOINT: &str = "https://huggingface.co";
/// How long a server may keep silent if nothing else is said.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Where repositories come from and where they are kept.
///
/// [`load`](crate::load) fetches with [`Hub::from_env`]; make one by hand to fetch with other settings, and load the folder
/// that [`fetch`](Self::fetch) gives.
///
/// ```no_run
/// let mut hub = recant::Hub::from_env()?;
/// hub.offline = true;
/// let folder = hub.fetch("Qwen/Qwen3.5-0.8B", &mut |_, _| {})?;
/// let model = recant::load(folder)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
#[non_exhaustive]
pub struct Hub {
    /// The server, without a slash at the end.
    pub endpoint: String,
    /// The folder with a subfolder for each repository, laid out as all clients of the Hub lay it out.
    pub cache: PathBuf,
    /// What is sent to be let into private and gated repositories.
    pub token: Option<String>,
    /// Whether to take what the cache has and ask nobody.
    pub offline: bool,
    /// How long the server may keep silent in the middle of a file, and how long it may take to list a repository, before it is
    /// given up. A connection that is given up is closed by the system, not by this library; until then its file cannot be
    /// fetched again.
    pub timeout: Duration,
}

impl Hub {
    /// The settings that the environment asks for, as other clients of the Hub read it:
    ///
    /// - `HF_ENDPOINT`: the server; else `https://huggingface.co`.
    /// - `HF_HUB_CACHE`: the cache; else `hub` in `HF_HOME`, or in `huggingface` in `XDG_CACHE_HOME` or `~/.cache`.
    /// - `HF_TOKEN`: the token; else what the file `HF_TOKEN_PATH` holds, or the file `token` in `HF_HOME`.
    /// - `HF_HUB_OFFLINE`: `1`, `true`, `yes` or `on` to ask nobody.
    /// - `HF_HUB_DOWNLOAD_TIMEOUT`: the time-out in seconds; else 60.
    ///
    /// # Errors
    /// No variable says where the cache is, and there is no home folder.
    pub fn from_env() -> Result<Self, HubError> {
        Self::of(&|name| std::env::var(name).ok(), std::env::home_dir())
    }

    fn of(var: &dyn Fn(&str) -> Option<String>, user: Option<PathBuf>) -> Result<Self, HubError> {
        let var = |name| var(name).filter(|value| !value.is_empty());
        let path = |name| var(name).map(PathBuf::from);
        let caches = || path("XDG_CACHE_HOME").or_else(|| Some(user?.join(".cache")));
        let home = path("HF_HOME").or_else(|| Some(caches()?.join("huggingface")));
        let in_home = |name| home.as_ref().map(|home| home.join(name));
        let token = || {
            let file = path("HF_TOKEN_PATH").or_else(|| in_home("token"))?;
            std::fs::read_to_string(file).ok()
        };
        Ok(Self {
            endpoint: var("HF_ENDPOINT")
                .unwrap_or_else(|| ENDPOINT.to_owned())
                .trim_end_matches('/')
                .to_owned(),
            cache: path("HF_HUB_CACHE")
                .or_else(|| in_home("hub"))
                .ok_or(HubError::NoCache)?,
            token: var("HF_TOKEN")
                .or_else(token)
                .map(|token| token.trim().to_owned())
                .filter(|token| !token.is_empty()),
            offline: var("HF_HUB_OFFLINE")
                .is_some_and(|value| ["1", "true", "yes", "on"].contains(&value.to_lowercase().as_str())),
            timeout: var("HF_HUB_DOWNLOAD_TIMEOUT")
                .and_then(|seconds| seconds.parse().ok())
                .map_or(TIMEOUT, |seconds: u32| Duration::from_secs(seconds.max(1).into())),
        })
    }

    /// Fetches what it takes to load a model, and gives the folder with it: the configurations, the tokenizer, the chat
    /// template, and the weights in safetensors. `progress` is told how many of how many bytes are there.
    ///
    /// A repository is `owner/name`, at another revision than `main` `owner/name@revision`: a branch, a tag or a commit. The
    /// files are all of one commit. What the cache has is not fetched again; where the server cannot be reached, what the cache
    /// has of the revision is taken if it is complete. A download that broke off is gone on with.
    ///
    /// # Errors
    /// A name that is none, a repository that does not exist or is not open to the token, a repository without a model in
    /// safetensors, no answer and nothing in the cache, a file that does not arrive whole, a disk that cannot be written.
    pub fn fetch(&self, repository: &str, progress: &mut dyn FnMut(u64, u64)) -> Result<PathBuf, HubError> {
        let id = RepoId::parse(repository).ok_or_else(|| HubError::NoName {
            found: repository.to_owned(),
        })?;
        fetch::fetch(self, &id, progress)
    }

    /// Whether a text has the form of a repository's name.
    pub(crate) fn names(text: &str) -> bool {
        RepoId::parse(text).is_some()
    }
}

impl std::fmt::Debug for Hub {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Hub")
            .field("endpoint", &self.endpoint)
            .field("cache", &self.cache)
            // A token is a secret.
            .field("token", &self.token.as_ref().map(|_| "..."))
            .field("offline", &self.offline)
            .field("timeout", &self.timeout)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(vars: &[(&str, &str)]) -> Hub {
        let var = |name: &str| {
            let found = vars.iter().find(|(key, _)| *key == name)?;
            Some(found.1.to_owned())
        };
        Hub::of(&var, Some("/home/me".into())).expect("a cache")
    }

    #[test]
    fn the_environment_is_read_as_other_clients_read_it() {
        let plain = of(&[("HF_ENDPOINT", ""), ("HF_HUB_OFFLINE", "0")]);
        assert_eq!(plain.endpoint, "https://huggingface.co");
        assert_eq!(plain.cache, PathBuf::from("/home/me/.cache/huggingface/hub"));
        assert!(plain.token.is_none() && !plain.offline);
        assert_eq!(
            of(&[("XDG_CACHE_HOME", "/c")]).cache,
            PathBuf::from("/c/huggingface/hub")
        );
        assert_eq!(of(&[("HF_HOME", "/h")]).cache, PathBuf::from("/h/hub"));
        let all = of(&[
            ("HF_ENDPOINT", "http://localhost:1/"),
            ("HF_HOME", "/h"),
            ("HF_HUB_CACHE", "/cache"),
            ("HF_TOKEN", " hf_secret\n"),
            ("HF_HUB_OFFLINE", "TRUE"),
            ("HF_HUB_DOWNLOAD_TIMEOUT", "10"),
        ]);
        assert_eq!(all.timeout, Duration::from_secs(10));
        assert_eq!(plain.timeout, Duration::from_secs(60));
        assert_eq!(all.endpoint, "http://localhost:1");
        assert_eq!(all.cache, PathBuf::from("/cache"));
        assert_eq!(all.token.as_deref(), Some("hf_secret"));
        assert!(all.offline);
        assert!(!format!("{all:?}").contains("secret"));
    }

    #[test]
    fn a_token_is_read_from_its_file() {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::write(folder.path().join("token"), "hf_file\n").expect("a file");
        let home = folder.path().to_str().expect("a path");
        assert_eq!(of(&[("HF_HOME", home)]).token.as_deref(), Some("hf_file"));
    }

    #[test]
    fn without_a_home_the_cache_must_be_named() {
        let error = Hub::of(&|_| None, None).expect_err("a refusal");
        assert!(error.to_string().contains("HF_HOME"), "{error}");
    }
}
