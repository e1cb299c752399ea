//! The order of value heads.
//!
//! A Gated DeltaNet layer has `r` value heads for each key head. Checkpoints of the Hub keep the `r` of a key head together;
//! the converter for `qwen35` and `qwen35moe` deals them out, the first of every key head, then the second of each, and so
//! on. Here they go back to where the model's own code has them, so that caches and states are those of a Hub checkpoint.

/// The value heads of a model as its file orders them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Heads {
    pub(super) keys: usize,
    pub(super) values: usize,
    pub(super) key_dim: usize,
    pub(super) value_dim: usize,
    /// Whether the file deals them out.
    pub(super) dealt: bool,
}

/// Where the rows, or the groups of columns, of a matrix come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Order {
    AsStored,
    /// For each row of the result, the row in the file.
    Rows(Vec<usize>),
    /// For each run of so many columns of the result, the run in the file.
    Columns {
        width: usize,
        runs: Vec<usize>,
    },
}

impl Heads {
    /// Rows of q and k together.
    fn fixed(&self) -> usize {
        self.keys.saturating_mul(self.key_dim).saturating_mul(2)
    }

    /// Where the file keeps value head `head`.
    fn slot(&self, head: usize) -> usize {
        let each = self.values / self.keys;
        head % each * self.keys + head / each
    }

    fn is_moved(&self) -> bool {
        self.dealt && self.keys != self.values
    }

    /// Of a matrix of so many rows, of which the last are value heads of `width` each behind `before` others. None if they are
    /// not: an order is never longer than the matrix that it is for.
    fn ordered(&self, rows: usize, before: usize, width: usize) -> Option<Order> {
        if !self.is_moved() {
            return Some(Order::AsStored);
        }
        if self.values.saturating_mul(width).saturating_add(before) != rows {
            return None;
        }
        let heads = (0..self.values)
            .flat_map(|head| (0..width).map(move |row| before + self.slot(head) * width + row));
        Some(Order::Rows((0..before).chain(heads).collect()))
    }

    /// Rows of the queries, keys and values, of the convolution's channels too.
    pub(super) fn channel_rows(&self, rows: usize) -> Option<Order> {
        self.ordered(rows, self.fixed(), self.value_dim)
    }

    /// Rows of the output gate.
    pub(super) fn value_rows(&self, rows: usize) -> Option<Order> {
        self.ordered(rows, 0, self.value_dim)
    }

    /// Rows of what has one for each value head.
    pub(super) fn head_rows(&self, rows: usize) -> Option<Order> {
        self.ordered(rows, 0, 1)
    }

    /// Columns of the output projection.
    pub(super) fn value_columns(&self, columns: usize) -> Option<Order> {
        if !self.is_moved() {
            return Some(Order::AsStored);
        }
        (self.values.saturating_mul(self.value_dim) == columns).then(|| Order::Columns {
            width: self.value_dim,
            runs: (0..self.values).map(|head| self.slot(head)).collect(),
        })
    }

    /// Of Qwen3-Next's fused b and a, grouped by key head, the rows of b (`part` 0) or of a (1), of which there are so many.
    pub(super) fn part_of_pair(&self, part: usize, rows: usize) -> Option<Order> {
        let each = self.values / self.keys;
        let of = |head| (head / each * 2 + part) * each + head % each;
        (self.values == rows).then(|| Order::Rows((0..rows).map(of).collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn heads(keys: usize, values: usize) -> Heads {
        Heads {
            keys,
            values,
            key_dim: 1,
            value_dim: 2,
            dealt: true,
        }
    }

    #[test]
    fn three_value_heads_a_key_head_come_back_from_where_they_were_dealt() {
        // The file holds the first value heads of both key heads (0 and 3), then the second, then the third.
        let dealt = [0, 3, 1, 4, 2, 5];
        let Some(Order::Rows(rows)) = heads(2, 6).head_rows(6) else {
            panic!("rows move");
        };
        let back: Vec<usize> = rows.iter().map(|row| dealt[*row]).collect();
        assert_eq!(back, [0, 1, 2, 3, 4, 5]);
    }

    #[test]
    fn rows_of_queries_and_keys_stay() {
        assert_eq!(
            heads(2, 4).channel_rows(12),
            Some(Order::Rows(vec![0, 1, 2, 3, 4, 5, 8, 9, 6, 7, 10, 11]))
        );
        assert_eq!(
            heads(2, 4).value_columns(8),
            Some(Order::Columns {
                width: 2,
                runs: vec![0, 2, 1, 3]
            })
        );
    }

    #[test]
    fn as_many_value_heads_as_key_heads_are_not_moved() {
        assert_eq!(heads(2, 2).channel_rows(8), Some(Order::AsStored));
        assert_eq!(heads(2, 2).value_columns(4), Some(Order::AsStored));
    }

    #[test]
    fn a_fused_pair_is_taken_apart_by_key_head() {
        // For each key head, b of its value heads, then a of them.
        let fused = ["b0", "b1", "a0", "a1", "b2", "b3", "a2", "a3"];
        let names = |part| {
            let Some(Order::Rows(rows)) = heads(2, 4).part_of_pair(part, 4) else {
                panic!("rows are chosen");
            };
            rows.iter().map(|row| fused[*row]).collect::<Vec<_>>()
        };
        assert_eq!(names(0), ["b0", "b1", "b2", "b3"]);
        assert_eq!(names(1), ["a0", "a1", "a2", "a3"]);
    }

    #[test]
    fn a_matrix_of_another_size_has_no_order() {
        let heads = Heads {
            keys: 1 << 19,
            values: 1 << 20,
            key_dim: 1 << 20,
            value_dim: 1 << 20,
            dealt: true,
        };
        for found in [
            heads.channel_rows(12),
            heads.value_rows(12),
            heads.head_rows(12),
            heads.value_columns(12),
            heads.part_of_pair(0, 12),
        ] {
            assert_eq!(found, None);
        }
    }
}
