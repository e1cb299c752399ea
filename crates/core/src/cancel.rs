//! A way to stop work from elsewhere.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

use crate::{Error, Result};

/// A flag that stops a call: clones share it, and any thread may raise it.
///
/// ```
/// use recant_core::Cancel;
///
/// let cancel = Cancel::new();
/// let elsewhere = cancel.clone();
/// std::thread::spawn(move || elsewhere.cancel()).join().ok();
/// assert!(cancel.is_cancelled());
/// ```
#[derive(Debug, Clone, Default)]
pub struct Cancel(Arc<AtomicBool>);

impl Cancel {
    /// A flag that is not raised.
    pub fn new() -> Self {
        Self::default()
    }

    /// Stops whatever looks at this flag, soon: a model between two layers, generation between two rounds.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Release);
    }

    /// Takes the flag down, so that work can go on.
    pub fn clear(&self) {
        self.0.store(false, Ordering::Release);
    }

    /// Whether the flag is raised.
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }

    /// [`Error::Cancelled`] if the flag is raised.
    pub fn check(&self) -> Result<()> {
        if self.is_cancelled() {
            return Err(Error::Cancelled);
        }
        Ok(())
    }
}
