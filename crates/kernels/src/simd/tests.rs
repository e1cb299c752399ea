//! Every operation of every set against the portable one, bit by bit.

use super::*;
use crate::common::Numbers;

/// Runs a kernel on every set that the machine has, and compares what it wrote with what the portable set's wrote.
#[track_caller]
fn same_on_all<K: Kernel>(what: &str, kernel: impl Fn(Isa, Out) -> K) {
    let sets = available();
    assert!(
        cfg!(not(any(target_arch = "x86_64", target_arch = "aarch64"))) || sets.len() > 1,
        "nothing to compare on this machine"
    );
    let bits = |isa| {
        let out = Out::default();
        run(isa, kernel(isa, out.clone()));
        out.0.take()
    };
    let portable = bits(Isa::Portable);
    assert!(!portable.is_empty(), "{what}: nothing was written");
    for &isa in sets {
        let own = bits(isa);
        assert_eq!(own.len(), portable.len(), "{what}, {isa:?}");
        for (i, (own, portable)) in own.iter().zip(&portable).enumerate() {
            assert_eq!(own, portable, "{what}, {isa:?}: number {i}");
        }
    }
}

/// What a kernel writes.
#[derive(Default, Clone)]
struct Out(std::rc::Rc<std::cell::RefCell<Vec<u32>>>);

impl Out {
    fn bits(&self, bits: impl IntoIterator<Item = u32>) {
        self.0.borrow_mut().extend(bits);
    }

    /// Any NaN is as good as another.
    fn numbers(&self, x: &[f32]) {
        let one_nan = |x: &f32| if x.is_nan() { f32::NAN } else { *x };
        self.bits(x.iter().map(|x| one_nan(x).to_bits()));
    }

    fn wide<S: Simd>(&self, s: S, x: S::W) {
        let mut lanes = [0.0; WIDE];
        s.wide_store(x, &mut lanes);
        self.numbers(&lanes);
    }
}

/// Numbers of all kinds: the ends of ranges, both zeros, what is no number, and some in between.
fn kinds() -> Vec<f32> {
    let ends = [
        0.0,
        1e-45,
        f32::MIN_POSITIVE,
        0.5,
        1.0,
        1.000_000_1,
        3.0,
        1e30,
        f32::MAX,
        f32::INFINITY,
    ];
    let mut kinds: Vec<f32> = ends.iter().flat_map(|x| [*x, -*x]).collect();
    kinds.push(f32::NAN);
    let mut numbers = Numbers(1);
    kinds.extend((0..15).map(|_| numbers.next()));
    kinds
}

/// Every pair of kinds in some lane, and a third number with each.
struct Arithmetic<'a> {
    kinds: &'a [f32],
    out: Out,
}

impl Kernel for Arithmetic<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let kinds = self.kinds;
        let at = |i: usize| kinds[i % kinds.len()];
        for shift in 0..kinds.len() {
            for first in (0..kinds.len()).step_by(LANES) {
                let lanes = |by: usize| std::array::from_fn(|i| at((first + i) * (1 + by % 2) + by));
                let [a, b, c] = [0, shift, 2 * shift + 1].map(|by| s.load(&lanes(by)));
                for x in [s.add(a, b), s.sub(a, b), s.mul(a, b), s.div(a, b), s.fma(a, b, c)] {
                    self.out.numbers(&s.lanes(x));
                }
                for x in [s.max(a, b), s.min(a, b), s.splat(at(first)), s.zero()] {
                    self.out.bits(s.lanes(x).map(f32::to_bits));
                }
                let wide = |by| s.wide_load(&std::array::from_fn(|i| at(first + i + by)));
                let [a, b, c] = [0, shift, 2 * shift + 1].map(wide);
                for x in s.halves(a) {
                    self.out.numbers(&s.lanes(x));
                }
                for x in [
                    s.wide_add(a, b),
                    s.wide_sub(a, b),
                    s.wide_mul(a, b),
                    s.wide_fma(a, b, c),
                    s.wide_splat(at(first)),
                    s.twice(s.load(&lanes(shift))),
                ] {
                    self.out.wide(s, x);
                }
            }
        }
    }
}

#[test]
fn arithmetic_has_the_portable_bits() {
    let kinds = kinds();
    same_on_all("arithmetic", |_, out| Arithmetic { kinds: &kinds, out });
}

struct Sums<'a> {
    x: &'a [[f32; LANES]; LANES],
    out: Out,
}

impl Kernel for Sums<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let x = self.x.map(|x| s.load(&x));
        self.out.numbers(&x.map(|x| s.sum(x)));
        self.out.numbers(&s.lanes(s.sums(x)));
    }
}

#[test]
fn sums_have_the_portable_bits() {
    let mut numbers = Numbers(2);
    for _ in 0..1000 {
        let x = std::array::from_fn(|_| std::array::from_fn(|_| numbers.next()));
        same_on_all("sums", |_, out| Sums { x: &x, out });
    }
}

struct Powers(Out);

impl Kernel for Powers {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for n in -126..=127 {
            self.0.numbers(&s.lanes(s.pow2(s.splat(n as f32))));
        }
    }
}

#[test]
fn powers_have_the_portable_bits() {
    same_on_all("powers of two", |_, out| Powers(out));
}

/// All values of both 16-bit types.
struct Halves(Out);

impl Kernel for Halves {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for first in (0..=u16::MAX).step_by(WIDE) {
            let bits: [u16; WIDE] = std::array::from_fn(|i| first + i as u16);
            for bits in bits.as_chunks::<LANES>().0 {
                self.0
                    .bits(s.lanes(s.f16(&bits.map(f16::from_bits))).map(f32::to_bits));
                self.0.numbers(&s.lanes(s.bf16(&bits.map(bf16::from_bits))));
            }
            self.0.wide(s, s.wide_f16(&bits.map(f16::from_bits)));
            self.0.wide(s, s.wide_bf16(&bits.map(bf16::from_bits)));
            let mut line = Line::ZERO;
            *line.view_mut::<u16, 32>() = std::array::from_fn(|i| bits[i % WIDE].rotate_left(i as u32 / 16));
            for x in s.bf16_pairs(&line) {
                self.0.wide(s, x);
            }
        }
    }
}

#[test]
fn halves_have_the_portable_bits() {
    same_on_all("halves", |_, out| Halves(out));
}

/// Some random bytes.
fn line(numbers: &mut Numbers) -> Line {
    Line(std::array::from_fn(|_| (numbers.next() * 128.0 + 128.0) as u8))
}

struct Fields<'a> {
    line: Line,
    table: &'a [f32; WIDE],
    out: Out,
}

impl Kernel for Fields<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for shift in (0..32).step_by(8) {
            self.out.wide(s, s.byte(&self.line, shift));
        }
        for shift in (0..32).step_by(4) {
            let table = s.wide_load(self.table);
            self.out.wide(s, s.pick(table, &self.line, shift));
        }
    }
}

#[test]
fn fields_of_bits_have_the_portable_bits() {
    let mut numbers = Numbers(3);
    for _ in 0..100 {
        let line = line(&mut numbers);
        let table = &std::array::from_fn(|_| numbers.next());
        same_on_all("fields of bits", |_, out| Fields { line, table, out });
    }
}

/// All pairs of bytes.
struct SmallFloats(Out);

impl Kernel for SmallFloats {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for first in (0..=u16::MAX).step_by(WIDE) {
            let pairs = std::array::from_fn(|i| (first + i as u16).to_le_bytes());
            for x in s.e4m3_pairs(&pairs) {
                self.0.wide(s, x);
            }
        }
    }
}

#[test]
fn small_floats_have_the_portable_bits() {
    same_on_all("E4M3", |_, out| SmallFloats(out));
}

#[test]
fn small_floats_are_those_of_their_definition() {
    let out = Out::default();
    run(Isa::Portable, SmallFloats(out.clone()));
    let found = out.0.take();
    assert_eq!(found.len(), 2 << 16);
    for (i, found) in found.into_iter().enumerate() {
        // Sixteen pairs, their first ones in front.
        let pair = i / (2 * WIDE) * WIDE + i % WIDE;
        let code = (pair >> (8 * (i / WIDE % 2))) & 255;
        let (exponent, mantissa) = (code as i32 >> 3 & 15, (code & 7) as f32);
        let size = match exponent {
            0 => mantissa / 8.0 * 2.0_f32.powi(-6),
            e => (1.0 + mantissa / 8.0) * 2.0_f32.powi(e - 7),
        };
        let number = if code < 128 { size } else { -size };
        assert_eq!(f32::from_bits(found) * 256.0, number, "{code:#04x}");
    }
}

/// What weights are.
#[derive(Debug, Clone, Copy)]
enum Weights {
    Bytes,
    Nibbles,
    Codes([u8; 16]),
}

struct Dots<'a, const R: usize> {
    weights: Weights,
    lines: &'a [Line],
    x: &'a [[i32; R]],
    from: [i32; R],
    out: Out,
}

impl<const R: usize> Kernel for Dots<'_, R> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let sums = match self.weights {
            Weights::Bytes => s.dot_bytes(self.lines, self.x, &self.from),
            Weights::Nibbles => s.dot_nibbles(self.lines, self.x, &self.from),
            Weights::Codes(table) => s.dot_codes(self.lines, &table, self.x, &self.from),
        };
        for sum in sums.as_flattened() {
            self.out.wide(s, *sum);
        }
    }
}

/// `fill` gives lines, `quad` four bytes of a row.
fn dots<const R: usize>(
    weights: Weights,
    lines: usize,
    mut fill: impl FnMut() -> Line,
    mut quad: impl FnMut() -> [i8; 4],
) {
    let quads = match weights {
        Weights::Bytes => lines / 2,
        Weights::Nibbles | Weights::Codes(_) => lines,
    };
    let lines: Vec<Line> = (0..lines).map(|_| fill()).collect();
    let x: Vec<[[i8; 4]; R]> = (0..quads).map(|_| std::array::from_fn(|_| quad())).collect();
    let from: [i32; R] = std::array::from_fn(|r| 1000 * r as i32 - 1700);
    let sums: [i32; R] = std::array::from_fn(|r| x.iter().flat_map(|x| x[r]).map(i32::from).sum());
    let x: Vec<[i32; R]> = x
        .iter()
        .map(|x| x.map(|x| i32::from_ne_bytes(x.map(|x| x as u8))))
        .collect();
    let what = format!("{} lines by {R} rows, {weights:?}", lines.len());
    same_on_all(&what, |isa, out| {
        let offset = match weights {
            Weights::Nibbles => 0,
            Weights::Bytes | Weights::Codes(_) => isa.byte_offset(),
        };
        Dots {
            weights,
            lines: &lines,
            x: &x,
            from: std::array::from_fn(|r| from[r] + offset * sums[r]),
            out,
        }
    });
}

fn dots_of_rows<const R: usize>() {
    let mut numbers = Numbers(R as u64);
    let table = std::array::from_fn(|_| (numbers.next() * 128.0 + 128.0) as u8);
    let ends = std::array::from_fn(|i| [0, 255, 128, 127][i % 4]);
    for (weights, most) in [
        (Weights::Bytes, 64),
        (Weights::Nibbles, 8),
        (Weights::Codes(table), 64),
        (Weights::Codes(ends), 64),
    ] {
        for lines in [2, 4, most] {
            let mut rows = Numbers(lines as u64);
            let mut quad = || std::array::from_fn(|_| (rows.next() * 127.5) as i8);
            dots::<R>(weights, lines, || line(&mut numbers), &mut quad);
            for byte in [0, 0x11, 127, 128, 255] {
                for x in [-127, 127] {
                    dots::<R>(weights, lines, || Line([byte; 64]), || [x; 4]);
                }
            }
        }
    }
}

#[test]
fn whole_dot_products_have_the_portable_bits() {
    dots_of_rows::<1>();
    dots_of_rows::<2>();
    dots_of_rows::<4>();
    dots_of_rows::<5>();
    dots_of_rows::<6>();
}

struct Rounding<'a> {
    x: &'a [f32; 2 * WIDE],
    by: f32,
    out: Out,
}

impl Kernel for Rounding<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (bytes, sum) = s.to_bytes(self.x, self.by);
        self.out.bits(bytes.map(|x| i32::from(x) as u32));
        self.out.bits([sum as u32, s.magnitude(self.x)]);
    }
}

#[test]
fn rounding_to_bytes_has_the_portable_bits() {
    let mut numbers = Numbers(4);
    for _ in 0..1000 {
        let x = std::array::from_fn(|_| numbers.next());
        same_on_all("random numbers", |_, out| Rounding {
            x: &x,
            by: 127.0,
            out,
        });
    }
    // All ties.
    for first in -127..127 - 31 {
        let x = std::array::from_fn(|i| (first + i as i32) as f32 + 0.5);
        same_on_all("ties", |_, out| Rounding { x: &x, by: 1.0, out });
    }
}

struct Magnitude<'a> {
    x: &'a [f32; 2 * WIDE],
    out: Out,
}

impl Kernel for Magnitude<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        self.out.bits([s.magnitude(self.x)]);
    }
}

#[test]
fn the_largest_magnitude_is_found_at_every_place() {
    for place in 0..2 * WIDE {
        for most in [-2.0, f32::MAX, f32::NEG_INFINITY, f32::NAN, -f32::NAN] {
            let mut x = [1.0; 2 * WIDE];
            x[(place + 5) % (2 * WIDE)] = -1.5;
            x[place] = most;
            same_on_all("magnitude", |_, out| Magnitude { x: &x, out });
        }
    }
}
