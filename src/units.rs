//! Units of measure, kept apart by name: MB is 10^6 bytes, MiB is 2^20.

pub const KIB: f64 = 1024.0;
pub const MIB: f64 = 1024.0 * KIB;
pub const GIB: f64 = 1024.0 * MIB;
pub const MB: f64 = 1e6;
pub const GB: f64 = 1e9;

/// A byte count in the largest binary unit that keeps it at or above one, for messages ("1.50 GiB").
pub fn human_bytes(bytes: u64) -> String {
    let b = bytes as f64;
    match b {
        _ if b >= GIB => format!("{:.2} GiB", b / GIB),
        _ if b >= MIB => format!("{:.2} MiB", b / MIB),
        _ if b >= KIB => format!("{:.2} KiB", b / KIB),
        _ => format!("{bytes} B"),
    }
}

/// A duration in a unit that reads well, for messages ("2.4 min"); what is not nothing never prints as nothing.
pub fn human_seconds(seconds: f64) -> String {
    match seconds {
        s if s >= 90.0 => format!("{:.1} min", s / 60.0),
        s if s >= 1.0 => format!("{s:.1} s"),
        s if s >= 1e-3 => format!("{:.1} ms", s * 1e3),
        s if s >= 1e-6 => format!("{:.1} us", s * 1e6),
        s if s >= 1e-10 => format!("{:.1} ns", s * 1e9),
        s if s > 0.0 => "under 0.1 ns".into(),
        _ => "0 s".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::human_seconds;

    #[test]
    fn a_duration_has_a_digit_that_says_something() {
        for (seconds, words) in [
            (144.0, "2.4 min"),
            (89.0, "89.0 s"),
            (0.0125, "12.5 ms"),
            (3e-6, "3.0 us"),
            (4e-8, "40.0 ns"),
            (1e-10, "0.1 ns"),
            (1e-13, "under 0.1 ns"),
            (0.0, "0 s"),
            (-0.0, "0 s"),
        ] {
            assert_eq!(human_seconds(seconds), words, "{seconds}");
        }
    }
}
