//! Stacks of caches: the laws of `Cache` for all layers together.

use candle_core::Tensor;
use recant_core::{Cache, CacheStack, Result};

use super::lab::{rows_of, Bits, Lab, Subject, Trouble};
use super::{laws, Options};
use crate::Failure;

/// Feeds a stack as a model does.
pub(super) type Feed<'a> = dyn Fn(&mut CacheStack, &[u32]) -> Result<Tensor> + 'a;

pub(super) fn check(
    make: &dyn Fn() -> CacheStack,
    feed: &Feed<'_>,
    options: &Options,
) -> std::result::Result<(), Failure> {
    let subject = || -> Box<dyn Subject + '_> { Box::new(Stack { stack: make(), feed }) };
    laws::check(&Lab::new(&subject, None), options)
}

struct Stack<'a> {
    stack: CacheStack,
    feed: &'a Feed<'a>,
}

impl Subject for Stack<'_> {
    fn cache(&self) -> &dyn Cache {
        &self.stack
    }

    fn cache_mut(&mut self) -> &mut dyn Cache {
        &mut self.stack
    }

    fn feed(&mut self, tokens: &[u32]) -> std::result::Result<Vec<Bits>, Trouble> {
        let output = (self.feed)(&mut self.stack, tokens)?;
        self.stack.check_even()?;
        Ok(rows_of(&output)?)
    }
}
