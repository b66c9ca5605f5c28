//! The GPU architectures that kernels are compiled for.

use std::fmt;

/// A compute capability, such as 9.0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Arch {
    pub major: u32,
    pub minor: u32,
}

impl Arch {
    pub const AMPERE: Self = Self { major: 8, minor: 0 };
    pub const HOPPER: Self = Self { major: 9, minor: 0 };
}

/// As NVRTC spells it. From 9.0 on it ends in "a": without it NVRTC refuses instructions of one architecture alone, such as
/// Hopper's wgmma and setmaxnreg. Such code runs on that architecture only.
impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let suffix = if self.major >= 9 { "a" } else { "" };
        write!(f, "sm_{}{}{suffix}", self.major, self.minor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hopper_has_the_suffix_and_ampere_has_none() {
        assert_eq!((Arch::AMPERE.to_string(), Arch::HOPPER.to_string()), ("sm_80".into(), "sm_90a".into()));
    }
}
