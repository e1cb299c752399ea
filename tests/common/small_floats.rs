//! What codes of 8 and 4 bits stand for.

/// The numbers of E2M1.
pub const E2M1: [f32; 16] = [
    0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0,
];

/// The number of a byte of E4M3.
pub fn e4m3(x: u8) -> f32 {
    let magnitude = match (x >> 3 & 15, f32::from(x & 7)) {
        (0, m) => m / 512.0,
        (e, m) => (1.0 + m / 8.0) * 2.0_f32.powi(i32::from(e) - 7),
    };
    if x > 127 {
        -magnitude
    } else {
        magnitude
    }
}
