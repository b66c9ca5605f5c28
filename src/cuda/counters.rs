//! Words that kernels count in from zero, cleared by one fill for all kernels of a step.
//!
//! Attention and many of cuBLASLt's products count the tiles that are taken, and each clears its counter before it. In a CUDA
//! graph that is a node of a microsecond and the gap behind it: 288 of them in xl's step (2,048 tokens, H200, cuBLASLt 13.1).

use std::cell::RefCell;

use anyhow::{Context as _, Result, ensure};
use cudarc::driver::result::memset_d8_async;
use cudarc::driver::sys;
use tch::{Device, Kind, Tensor};

use super::device::{context_of, in_context};
use crate::torch;
use crate::torch::graph::leave_out_fills;

/// Bytes of one, which no other kernel's cache line touches; where cuBLASLt wants a workspace to begin.
pub const COUNTER_BYTES: usize = 256;
const WORDS: i64 = COUNTER_BYTES as i64 / 4;

/// Counters in one place.
pub struct Counters {
    /// (counters, words of each)
    words: Tensor,
}

/// While it lives, the kernels that this thread launches take counters that are clear.
pub struct ClearCounters {
    outer: Option<Left>,
}

/// Those that no kernel has taken.
struct Left {
    words: Tensor,
    next: i64,
}

thread_local! {
    static LEFT: RefCell<Option<Left>> = const { RefCell::new(None) };
}

impl Counters {
    /// Errors: libtorch's.
    pub fn new(device: Device, count: usize) -> Result<Self> {
        Ok(Self { words: Tensor::f_zeros([i64::try_from(count)?, WORDS], (Kind::Int, device))? })
    }

    /// Clears them on this thread's stream, and hands them out to the kernels that this thread launches; those that find none
    /// left clear their own. What clears one of them besides is left out of a graph that is being captured, which needs these
    /// counters as long as it is replayed.
    ///
    /// Errors: libtorch's.
    pub fn clear(&self) -> Result<ClearCounters> {
        let _ = self.words.shallow_clone().f_zero_()?;
        leave_out_fills(&self.words);
        let left = Left { words: self.words.shallow_clone(), next: 0 };
        Ok(ClearCounters { outer: LEFT.replace(Some(left)) })
    }
}

impl Drop for ClearCounters {
    fn drop(&mut self) {
        LEFT.set(self.outer.take());
    }
}

/// A counter for one kernel on `device`, if one is left: int32 zeros of [`COUNTER_BYTES`]. Errors: libtorch's.
pub fn take_clear(device: Device) -> Result<Option<Tensor>> {
    LEFT.with_borrow_mut(|left| {
        let Some(Left { words, next }) = left.as_mut().filter(|left| left.words.device() == device) else {
            return Ok(None);
        };
        if *next == words.size()[0] {
            return Ok(None);
        }
        *next += 1;
        Ok(Some(words.f_get(*next - 1)?))
    })
}

/// Clears the first 4 bytes of a GPU's tensor by a fill of the driver, as cuBLASLt does, on this thread's stream.
///
/// Errors: those of [`context_of`], and CUDA's.
pub fn clear_word(counter: &Tensor) -> Result<()> {
    let device = counter.device();
    let stream = torch::stream::current_stream(device)? as sys::CUstream;
    // SAFETY: the tensor has 4 bytes or more on this device, whose context is current meanwhile.
    let fill = || unsafe { memset_d8_async(counter.data_ptr() as sys::CUdeviceptr, 0, 4, stream) };
    ensure!(counter.numel() * counter.kind().elt_size_in_bytes() >= 4, "a word has 4 bytes");
    let context = context_of(device)?;
    in_context(&context, fill).context("clearing a word")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_take_different_counters_until_none_is_left() {
        let counters = Counters::new(Device::Cpu, 2).unwrap();
        let take = || take_clear(Device::Cpu).unwrap();
        assert!(take().is_none(), "before the first is cleared");
        let clear = counters.clear().unwrap();
        let taken = [take().unwrap(), take().unwrap()];
        let places = taken.each_ref().map(|counter| counter.data_ptr() as usize);
        assert_eq!(places[1] - places[0], COUNTER_BYTES);
        assert!(take().is_none());
        for mut counter in taken {
            let _ = counter.fill_(7);
        }
        drop(clear);
        assert!(take().is_none(), "after they are dropped");
        let _clear = counters.clear().unwrap();
        assert_eq!(take().unwrap(), Tensor::zeros([WORDS], (Kind::Int, Device::Cpu)));
    }
}
