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

impl Order {
    /// Whether it makes `rows` rows of `width` out of so many rows in the file.
    pub(super) fn fits(&self, [rows, width]: [usize; 2], in_file: usize) -> bool {
        match self {
            Self::AsStored => rows <= in_file,
            Self::Rows(order) => order.len() == rows && order.iter().all(|row| *row < in_file),
            Self::Columns { width: run, runs } => rows <= in_file && run * runs.len() == width,
        }
    }
}

impl Heads {
    /// Rows of q and k together.
    fn fixed(&self) -> usize {
        2 * self.keys * self.key_dim
    }

    /// Where the file keeps value head `head`.
    fn slot(&self, head: usize) -> usize {
        let each = self.values / self.keys;
        head % each * self.keys + head / each
    }

    fn is_moved(&self) -> bool {
        self.dealt && self.keys != self.values
    }

    /// The rows of a matrix whose last rows are value heads of `width` rows each, behind `before` others.
    fn rows(&self, before: usize, width: usize) -> Order {
        if !self.is_moved() {
            return Order::AsStored;
        }
        let heads = (0..self.values)
            .flat_map(|head| (0..width).map(move |row| before + self.slot(head) * width + row));
        Order::Rows((0..before).chain(heads).collect())
    }

    /// Rows of the queries, keys and values, of the convolution's channels too.
    pub(super) fn channel_rows(&self) -> Order {
        self.rows(self.fixed(), self.value_dim)
    }

    /// Rows of the output gate.
    pub(super) fn value_rows(&self) -> Order {
        self.rows(0, self.value_dim)
    }

    /// Rows of what has one for each value head.
    pub(super) fn head_rows(&self) -> Order {
        self.rows(0, 1)
    }

    /// Columns of the output projection.
    pub(super) fn value_columns(&self) -> Order {
        if !self.is_moved() {
            return Order::AsStored;
        }
        Order::Columns {
            width: self.value_dim,
            runs: (0..self.values).map(|head| self.slot(head)).collect(),
        }
    }

    /// Of Qwen3-Next's fused b and a, grouped by key head, the rows of b (`part` 0) or of a (1).
    pub(super) fn part_of_pair(&self, part: usize) -> Order {
        let each = self.values / self.keys;
        let rows = (0..self.values).map(|head| (head / each * 2 + part) * each + head % each);
        Order::Rows(rows.collect())
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
        let Order::Rows(rows) = heads(2, 6).head_rows() else {
            panic!("rows move");
        };
        let back: Vec<usize> = rows.iter().map(|row| dealt[*row]).collect();
        assert_eq!(back, [0, 1, 2, 3, 4, 5]);
    }

    #[test]
    fn rows_of_queries_and_keys_stay() {
        assert_eq!(
            heads(2, 4).channel_rows(),
            Order::Rows(vec![0, 1, 2, 3, 4, 5, 8, 9, 6, 7, 10, 11])
        );
        assert_eq!(
            heads(2, 4).value_columns(),
            Order::Columns {
                width: 2,
                runs: vec![0, 2, 1, 3]
            }
        );
    }

    #[test]
    fn as_many_value_heads_as_key_heads_are_not_moved() {
        assert_eq!(heads(2, 2).channel_rows(), Order::AsStored);
        assert_eq!(heads(2, 2).value_columns(), Order::AsStored);
    }

    #[test]
    fn a_fused_pair_is_taken_apart_by_key_head() {
        // For each key head, b of its value heads, then a of them.
        let fused = ["b0", "b1", "a0", "a1", "b2", "b3", "a2", "a3"];
        let names = |part| {
            let Order::Rows(rows) = heads(2, 4).part_of_pair(part) else {
                panic!("rows are chosen");
            };
            rows.iter().map(|row| fused[*row]).collect::<Vec<_>>()
        };
        assert_eq!(names(0), ["b0", "b1", "b2", "b3"]);
        assert_eq!(names(1), ["a0", "a1", "a2", "a3"]);
    }
}
