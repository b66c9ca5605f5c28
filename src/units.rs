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

/// A duration in a unit that reads well, for messages ("2.4 min").
pub fn human_seconds(seconds: f64) -> String {
    match seconds {
        s if s >= 90.0 => format!("{:.1} min", s / 60.0),
        s if s >= 1.0 => format!("{s:.1} s"),
        s if s >= 1e-3 => format!("{:.1} ms", s * 1e3),
        s => format!("{:.1} us", s * 1e6),
    }
}
