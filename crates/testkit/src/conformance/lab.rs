//! What every suite is built of: a cache with a way to feed it, followed token by token against a reference.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

use candle_core::Tensor;
use recant_core::{Cache, Checkpoint, Result, Snapshot};

use crate::Failure;

/// Exact bits of what one token gave: an output row, or the rows of keys and values it may see.
pub(super) type Bits = Vec<u64>;

/// Why a feed gave nothing.
pub(super) enum Trouble {
    /// The cache or the model said no.
    Refused(recant_core::Error),
    /// What it gave breaks its own contract.
    Broken(String),
}

impl From<recant_core::Error> for Trouble {
    fn from(error: recant_core::Error) -> Self {
        Self::Refused(error)
    }
}

impl From<candle_core::Error> for Trouble {
    fn from(error: candle_core::Error) -> Self {
        Self::Refused(error.into())
    }
}

/// A cache of any kind, and how tokens get into it.
pub(super) trait Subject {
    fn cache(&self) -> &dyn Cache;
    fn cache_mut(&mut self) -> &mut dyn Cache;
    /// Feeds `tokens` in one call; gives one entry a token.
    fn feed(&mut self, tokens: &[u32]) -> std::result::Result<Vec<Bits>, Trouble>;
    /// Feeds `tokens` in one call, when what they give is of no interest. To be overridden where reading takes long.
    fn feed_unread(&mut self, tokens: &[u32]) -> std::result::Result<(), Trouble> {
        self.feed(tokens).map(|_| ())
    }
}

/// What a history of tokens must give, however it came about.
pub(super) struct Reference {
    outputs: Vec<Bits>,
    snapshot: Snapshot,
}

/// Outputs for a history of tokens.
pub(super) type Known<'a> = dyn Fn(&[u32]) -> Vec<Bits> + 'a;

/// Makes subjects, and knows what they must hold.
pub(super) struct Lab<'a> {
    make: &'a dyn Fn() -> Box<dyn Subject + 'a>,
    /// Outputs for a history, where they can be told without the subject.
    known: Option<&'a Known<'a>>,
    references: RefCell<HashMap<Vec<u32>, Rc<Reference>>>,
}

impl<'a> Lab<'a> {
    pub(super) fn new(make: &'a dyn Fn() -> Box<dyn Subject + 'a>, known: Option<&'a Known<'a>>) -> Self {
        Self {
            make,
            known,
            references: RefCell::default(),
        }
    }

    /// A new subject with nothing fed. `law` is what is about to be checked.
    pub(super) fn fresh(&self, law: &'static str) -> Sequence<'_, 'a> {
        Sequence {
            lab: self,
            law,
            scene: String::from("a new cache"),
            subject: (self.make)(),
            history: Vec::new(),
        }
    }

    /// A new subject fed `history` in one call.
    pub(super) fn fed(
        &self,
        law: &'static str,
        history: &[u32],
    ) -> std::result::Result<Sequence<'_, 'a>, Failure> {
        let mut sequence = self.fresh(law);
        if !history.is_empty() {
            sequence.feed(history)?;
        }
        Ok(sequence)
    }

    /// What a new subject gives and holds when fed `history` token by token.
    fn reference(&self, history: &[u32]) -> std::result::Result<Rc<Reference>, Failure> {
        if let Some(found) = self.references.borrow().get(history) {
            return Ok(Rc::clone(found));
        }
        let mut plain = self.fresh("tokens fed one by one are taken and can be read");
        let mut outputs = self.known_prefix(history);
        for token in &history[..outputs.len()] {
            plain.skip(*token)?;
        }
        for token in &history[outputs.len()..] {
            outputs.extend(plain.feed_raw(&[*token])?);
        }
        if let Some(known) = self.known {
            for (position, (found, expected)) in outputs.iter().zip(known(history)).enumerate() {
                plain.same_output(position, found, &expected)?;
            }
        }
        let snapshot = plain.snapshot()?;
        let reference = Rc::new(Reference { outputs, snapshot });
        self.references
            .borrow_mut()
            .insert(history.to_vec(), Rc::clone(&reference));
        Ok(reference)
    }

    /// Outputs of the longest beginning of `history` that has a reference already.
    fn known_prefix(&self, history: &[u32]) -> Vec<Bits> {
        let references = self.references.borrow();
        let longest = (1..history.len())
            .rev()
            .find_map(|len| references.get(&history[..len]));
        longest.map_or_else(Vec::new, |reference| reference.outputs.clone())
    }
}

/// One subject, followed: every call is checked against the reference of the tokens it should hold.
pub(super) struct Sequence<'l, 'a> {
    lab: &'l Lab<'a>,
    law: &'static str,
    scene: String,
    subject: Box<dyn Subject + 'a>,
    history: Vec<u32>,
}

impl Sequence<'_, '_> {
    pub(super) fn cache(&self) -> &dyn Cache {
        self.subject.cache()
    }

    pub(super) fn cache_mut(&mut self) -> &mut dyn Cache {
        self.subject.cache_mut()
    }

    pub(super) fn history(&self) -> &[u32] {
        &self.history
    }

    /// Feeds `tokens` in one call and checks what they gave.
    pub(super) fn feed(&mut self, tokens: &[u32]) -> std::result::Result<(), Failure> {
        let start = self.history.len();
        let found = self.feed_raw(tokens)?;
        let reference = self.lab.reference(&self.history)?;
        for (offset, found) in found.iter().enumerate() {
            self.same_output(start + offset, found, &reference.outputs[start + offset])?;
        }
        Ok(())
    }

    /// Feeds `tokens` in one-token calls.
    pub(super) fn feed_singly(&mut self, tokens: &[u32]) -> std::result::Result<(), Failure> {
        tokens.iter().try_for_each(|token| self.feed(&[*token]))
    }

    fn skip(&mut self, token: u32) -> std::result::Result<(), Failure> {
        match self.subject.feed_unread(&[token]) {
            Ok(()) => self.history.push(token),
            Err(Trouble::Refused(error)) => return Err(self.refused("feeding a token", error)),
            Err(Trouble::Broken(detail)) => return Err(self.broken(detail)),
        }
        Ok(())
    }

    fn feed_raw(&mut self, tokens: &[u32]) -> std::result::Result<Vec<Bits>, Failure> {
        self.note(format!("fed {}", tokens.len()));
        let outputs = match self.subject.feed(tokens) {
            Ok(outputs) => outputs,
            Err(Trouble::Refused(error)) => {
                return Err(self.refused(format!("feeding {} tokens", tokens.len()), error))
            }
            Err(Trouble::Broken(detail)) => return Err(self.broken(detail)),
        };
        self.history.extend_from_slice(tokens);
        self.check_len()?;
        if outputs.len() != tokens.len() {
            return Err(self.broken(format!(
                "{} tokens gave {} rows of output",
                tokens.len(),
                outputs.len()
            )));
        }
        Ok(outputs)
    }

    /// Feeds in one call whatever the answer is, and gives it. Nothing is checked.
    pub(super) fn try_feed(&mut self, tokens: &[u32]) -> std::result::Result<(), Trouble> {
        self.subject.feed(tokens).map(|_| ())
    }

    pub(super) fn trim(&mut self, n: usize) -> std::result::Result<(), Failure> {
        self.note(format!("trimmed {n}"));
        let result = self.cache_mut().trim(n);
        self.done(format!("trim({n})"), result)?;
        self.history.truncate(self.history.len() - n);
        self.check_len()
    }

    pub(super) fn checkpoint(&mut self) -> std::result::Result<Checkpoint, Failure> {
        self.note("checkpoint");
        let result = self.cache_mut().checkpoint();
        let checkpoint = self.done("checkpoint()", result)?;
        if checkpoint.len() != self.history.len() {
            return Err(self.broken(format!(
                "a checkpoint at {} tokens says {}",
                self.history.len(),
                checkpoint.len()
            )));
        }
        Ok(checkpoint)
    }

    pub(super) fn restore(&mut self, to: &Checkpoint) -> std::result::Result<(), Failure> {
        self.note("restored");
        let result = self.cache_mut().restore(to);
        self.done("restore()", result)?;
        self.history.truncate(to.len());
        self.check_len()
    }

    pub(super) fn commit(&mut self, checkpoint: Checkpoint) -> std::result::Result<(), Failure> {
        self.note("committed");
        self.cache_mut().commit(checkpoint);
        self.check_len()
    }

    pub(super) fn reset(&mut self) -> std::result::Result<(), Failure> {
        self.note("reset");
        self.cache_mut().reset();
        self.history.clear();
        self.check_len()
    }

    /// Loads a snapshot of `history`.
    pub(super) fn load(&mut self, from: &Snapshot, history: &[u32]) -> std::result::Result<(), Failure> {
        self.note(format!("loaded {}", history.len()));
        let fits = self.cache().fits(from);
        self.done("fits(), of a snapshot of the same kind of cache,", fits)?;
        let result = self.cache_mut().load(from);
        self.done("load(), of a snapshot that fits() accepts,", result)?;
        self.history = history.to_vec();
        self.check_len()
    }

    pub(super) fn snapshot(&self) -> std::result::Result<Snapshot, Failure> {
        self.done("snapshot()", self.cache().snapshot())
    }

    /// Refuses a state that is not, bit for bit, what the tokens fed one by one leave.
    pub(super) fn check_state(&self) -> std::result::Result<(), Failure> {
        let reference = self.lab.reference(&self.history)?;
        self.same_snapshot(
            &self.snapshot()?,
            &reference.snapshot,
            "the snapshot differs from that of a new cache fed the kept tokens one by one",
        )
    }

    /// Runs a call that must be refused, and checks that it was and that nothing changed.
    pub(super) fn must_refuse<T>(
        &mut self,
        what: &str,
        call: impl FnOnce(&mut dyn Cache) -> Result<T>,
    ) -> std::result::Result<(), Failure> {
        let (len, trimmable) = (self.cache().len(), self.cache().trimmable());
        if call(self.cache_mut()).is_ok() {
            return Err(self.broken(format!("{what} succeeded and must be refused")));
        }
        let after = (self.cache().len(), self.cache().trimmable());
        if after != (len, trimmable) {
            return Err(self.broken(format!(
                "{what} was refused, but length and trimmable went from {:?} to {after:?}",
                (len, trimmable)
            )));
        }
        self.check_state()
    }

    pub(super) fn same_snapshot(
        &self,
        found: &Snapshot,
        expected: &Snapshot,
        what: &str,
    ) -> std::result::Result<(), Failure> {
        match found.difference(expected) {
            None => Ok(()),
            Some(difference) => Err(self.broken(format!("{what}: {difference}"))),
        }
    }

    fn same_output(
        &self,
        position: usize,
        found: &Bits,
        expected: &Bits,
    ) -> std::result::Result<(), Failure> {
        if found == expected {
            return Ok(());
        }
        let at = found.iter().zip(expected).position(|(a, b)| a != b);
        Err(self.broken(format!(
            "what the token at position {position} gives or sees is not what it must: {} values against {}, first \
             difference at {}",
            found.len(),
            expected.len(),
            at.map_or("the end".to_owned(), |at| at.to_string())
        )))
    }

    pub(super) fn check_len(&self) -> std::result::Result<(), Failure> {
        let (found, expected) = (self.cache().len(), self.history.len());
        if found != expected || self.cache().is_empty() != (expected == 0) {
            return Err(self.broken(format!("its length is {found}, and {expected} tokens were kept")));
        }
        if self.cache().trimmable() > expected {
            return Err(self.broken(format!(
                "it says that {} of {expected} tokens can be trimmed",
                self.cache().trimmable()
            )));
        }
        Ok(())
    }

    /// Adds to the account of what was done.
    pub(super) fn note(&mut self, what: impl AsRef<str>) {
        self.scene.push_str(", ");
        self.scene.push_str(what.as_ref());
    }

    pub(super) fn broken(&self, detail: impl Into<String>) -> Failure {
        Failure::Broken {
            law: self.law,
            scene: self.scene.clone(),
            detail: detail.into(),
        }
    }

    fn refused(&self, step: impl Into<String>, source: recant_core::Error) -> Failure {
        Failure::Refused {
            law: self.law,
            scene: self.scene.clone(),
            step: step.into(),
            source: Box::new(source),
        }
    }

    pub(super) fn done<T>(
        &self,
        step: impl Into<String>,
        result: Result<T>,
    ) -> std::result::Result<T, Failure> {
        result.map_err(|error| self.refused(step, error))
    }
}

/// The bits of each row of `tensor`, which has at least one dimension.
///
/// Every float type converts to f64 without loss.
pub(super) fn rows_of(tensor: &Tensor) -> candle_core::Result<Vec<Bits>> {
    let rows = tensor.dims().first().copied().unwrap_or(0);
    let width = tensor.elem_count() / rows.max(1);
    let flat = tensor
        .to_dtype(candle_core::DType::F64)?
        .reshape((rows, width))?
        .to_vec2::<f64>()?;
    Ok(flat
        .into_iter()
        .map(|row| row.into_iter().map(f64::to_bits).collect())
        .collect())
}

/// A snapshot of the same contents that shares no storage with `from`.
pub(super) fn deep_copy(from: &Snapshot) -> candle_core::Result<Snapshot> {
    let mut copy = Snapshot::new(from.kind(), from.len());
    for (name, value) in from.settings() {
        copy = copy.with_setting(name, *value);
    }
    for (name, array) in from.arrays() {
        copy = copy.with_array(name, array.force_contiguous()?);
    }
    let parts = from
        .parts()
        .iter()
        .map(deep_copy)
        .collect::<candle_core::Result<Vec<_>>>()?;
    Ok(copy.with_parts(parts))
}
