//! Operators of libtorch whose work is done in Rust, for C++ code that registers them.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;

use anyhow::Result;
use cxx::{CxxString, CxxVector};
use tch::Tensor;

pub use super::bridge::ffi::Tensor as CxxTensor;
use super::bridge::{self, ffi, panic_message};
use crate::error::{Fault, fault_of, without_frames};

/// `std::vector<at::Tensor>`.
pub type TensorList = CxxVector<CxxTensor>;

/// How a call ended, for C++ to throw what Python expects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub enum Status {
    Done = 0,
    Failed = 1,
    OutOfMemory = 2,
}

/// Runs `body`. Its error's or panic's words become `message`, since neither may cross into C++.
pub fn run(message: Pin<&mut CxxString>, body: impl FnOnce() -> Result<()>) -> Status {
    let result = catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| Err(panic_message(panic.as_ref())));
    let Err(error) = result else { return Status::Done };
    message.push_str(&without_frames(&format!("{error:#}")));
    if matches!(fault_of(&error), Some(Fault::OutOfMemory { .. })) { Status::OutOfMemory } else { Status::Failed }
}

/// The tensors of a list, sharing their storage.
pub fn tensors(list: &TensorList) -> Vec<Tensor> {
    bridge::share_all(list)
}

/// Appends `tensors`, sharing their storage.
pub fn extend(mut list: Pin<&mut TensorList>, tensors: &[Tensor]) {
    tensors.iter().for_each(|tensor| ffi::push(list.as_mut(), bridge::borrow(tensor)));
}

#[cfg(test)]
mod tests {
    use cxx::let_cxx_string;

    use super::*;

    #[test]
    fn errors_and_panics_become_words_and_a_lack_of_memory_keeps_its_kind() {
        let outcome = |body: &dyn Fn() -> Result<()>| {
            let_cxx_string!(message = "");
            let status = run(message.as_mut(), body);
            (status, message.to_string())
        };
        assert_eq!(outcome(&|| Ok(())), (Status::Done, String::new()));
        assert_eq!(outcome(&|| anyhow::bail!("k is Half")), (Status::Failed, "k is Half".into()));
        assert_eq!(outcome(&|| panic!("row {}", 3)), (Status::Failed, "panicked: row 3".into()));
        let too_large = || Tensor::f_zeros([1 << 57], (tch::Kind::Double, tch::Device::Cpu));
        let (status, message) = outcome(&|| too_large().map(drop).map_err(Into::into));
        assert_eq!(status, Status::OutOfMemory);
        assert!(message.contains("you tried to allocate") && !message.contains("frame #"), "{message}");
    }

    #[test]
    fn tensors_are_shared_in_both_directions() {
        let one = Tensor::zeros([2], (tch::Kind::Float, tch::Device::Cpu));
        let mut list = bridge::list([]);
        extend(list.pin_mut(), std::slice::from_ref(&one));
        let back = tensors(&list);
        assert!(back.len() == 1 && back[0].data_ptr() == one.data_ptr());
    }
}
