//! What tells the trees of a store apart.

use std::fmt::Write as _;

use recant_core::Snapshot;

/// What must agree for rows to be shared: the model, and the kinds, settings, arrays and devices of its caches.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key {
    pub(super) model: String,
    /// Absent for the model's own caches. For a drafter's, how many tokens they were told beyond those they hold: row `i` may
    /// depend on that many more tokens than the first `i + 1`.
    pub(super) ahead: Option<usize>,
    pub(super) shape: String,
}

impl Key {
    pub(super) fn of_model(model: &str, caches: &Snapshot) -> Self {
        let mut shape = String::new();
        describe(caches, &mut shape);
        Self {
            model: model.to_owned(),
            ahead: None,
            shape,
        }
    }

    pub(super) fn of_drafter(model: &str, state: &Snapshot, ahead: usize) -> Self {
        Self {
            ahead: Some(ahead),
            ..Self::of_model(model, state)
        }
    }

    /// The row that belongs to the token at `position` of a text.
    pub(super) fn row(&self, position: usize) -> usize {
        position.saturating_sub(self.ahead.unwrap_or(0))
    }
}

/// Writes down what does not depend on the number of tokens.
fn describe(snapshot: &Snapshot, out: &mut String) {
    // Writing to a string does not fail.
    let _ = write!(out, "{:?}{:?}(", snapshot.kind(), snapshot.settings());
    for (name, array) in snapshot.arrays() {
        let _ = write!(
            out,
            "{name:?} {:?} {:?}",
            array.dtype(),
            array.device().location()
        );
        if snapshot.row_names().contains(name) {
            let _ = write!(out, " rows of {:?}", array.dims().get(1..));
        }
        out.push(';');
    }
    for part in snapshot.parts() {
        describe(part, out);
    }
    out.push(')');
}
