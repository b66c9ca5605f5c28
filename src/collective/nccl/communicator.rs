//! One rank's NCCL communicator: forming it, launching collectives, and ending it cleanly or by an abort.

use std::ffi::{c_int, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use cudarc::nccl::sys::{ncclComm_t, ncclDataType_t, ncclRedOp_t, ncclResult_t, ncclUniqueId};
use tch::{Device, Kind, Tensor};

use super::library::Api;
use crate::collective::{Op, Request};
use crate::cuda::{Stream, make_current};

/// What all ranks must agree on to form a communicator, and this rank's number.
pub(super) struct Membership {
    pub id: [u8; 128],
    pub rank: usize,
    pub world_size: usize,
    pub device: Device,
    pub timeout: Duration,
}

pub(super) struct Communicator {
    api: &'static Api,
    /// Null once it has been destroyed or aborted. NCCL lets one thread at a time use a communicator.
    raw: Mutex<Raw>,
}

struct Raw(ncclComm_t);

// SAFETY: NCCL lets any thread use a communicator, one at a time, which the mutex ensures.
unsafe impl Send for Raw {}

impl Communicator {
    /// Forms a communicator with the other ranks, on its device. Its calls block until NCCL has launched them.
    ///
    /// # Errors
    /// NCCL's; or the others have not arrived within the timeout.
    pub fn form(membership: Membership) -> Result<Self> {
        let Membership { id, rank, world_size, device, timeout } = membership;
        let api = Api::get()?;
        let (own, ranks) = (c_int::try_from(rank)?, c_int::try_from(world_size)?);
        let init = move || -> Result<Raw> {
            make_current(device)?;
            let id = ncclUniqueId { internal: id.map(|byte| byte as _) };
            // Never freed: with NCCL_COMM_BLOCKING=0 this call fails, and NCCL's own thread writes there later.
            let place: *mut ncclComm_t = Box::leak(Box::new(std::ptr::null_mut()));
            // SAFETY: the place is valid for ever.
            api.check(unsafe { (api.comm_init_rank)(place, ranks, id, own) }, None)?;
            // SAFETY: as above, and a call that has succeeded has written there for the last time.
            Ok(Raw(unsafe { place.read() }))
        };
        // The call returns only when the last rank has arrived, so another thread makes it and this one waits.
        let (sender, receiver) = mpsc::channel();
        let forming = std::thread::Builder::new().name("nccl-init".into()).spawn(move || sender.send(init()));
        forming.context("failed to start a thread that forms an NCCL communicator")?;
        let late = |_| anyhow!("the other ranks have not arrived within {:.1} s", timeout.as_secs_f64());
        let raw = receiver.recv_timeout(timeout).map_err(late).flatten().with_context(|| {
            format!("rank {rank} of {world_size} forming an NCCL communicator; set NCCL_DEBUG=INFO for details")
        })?;
        Ok(Self { api, raw: Mutex::new(raw) })
    }

    /// Launches the request on `stream` as one group of calls, after the work that is already on it.
    ///
    /// The tensors' memory must stay valid until the stream has completed them.
    pub fn launch(&self, request: Request, stream: &Stream) -> Result<()> {
        let raw = self.lock();
        ensure!(!raw.0.is_null(), "the communicator has been aborted");
        stream.on_device(|| {
            // SAFETY: no condition; ended below, on this thread, whether or not the calls fail.
            self.api.check(unsafe { (self.api.group_start)() }, Some(raw.0))?;
            let enqueued = self.enqueue(&raw, request, stream);
            // SAFETY: started above.
            let ended = self.api.check(unsafe { (self.api.group_end)() }, Some(raw.0));
            enqueued.and(ended)
        })?
    }

    fn enqueue(&self, raw: &Raw, request: Request, stream: &Stream) -> Result<()> {
        let (api, raw, stream) = (self.api, raw.0, stream.as_ptr());
        let check = |code: c_int| api.check(code, Some(raw));
        let address = |tensor: &Tensor| -> *mut c_void { tensor.data_ptr() };
        // In each of these calls the communicator is alive, and each pointer is to that many contiguous elements of that
        // type on the communicator's device, valid until the stream has completed the call; the caller has checked both.
        match request {
            Request::AllReduce { tensors, op } => tensors.iter().try_for_each(|tensor| {
                let (at, count, kind) = (address(tensor), tensor.numel(), data_type(tensor)?);
                // SAFETY: as above.
                check(unsafe { (api.all_reduce)(at, at, count, kind, reduction(op), raw, stream) })
            }),
            Request::Broadcast { tensor, root } => {
                let (at, count, kind) = (address(tensor), tensor.numel(), data_type(tensor)?);
                // SAFETY: as above.
                check(unsafe { (api.broadcast)(at, at, count, kind, c_int::try_from(root)?, raw, stream) })
            }
            Request::AllGather { outputs, inputs } => outputs.iter().zip(inputs).try_for_each(|(output, input)| {
                let (from, to, kind) = (address(input), address(output), data_type(input)?);
                // SAFETY: as above.
                check(unsafe { (api.all_gather)(from, to, input.numel(), kind, raw, stream) })
            }),
            Request::ReduceScatter { outputs, inputs, op } => {
                outputs.iter().zip(inputs).try_for_each(|(output, input)| {
                    let (from, to, kind) = (address(input), address(output), data_type(input)?);
                    // SAFETY: as above.
                    check(unsafe { (api.reduce_scatter)(from, to, output.numel(), kind, reduction(op), raw, stream) })
                })
            }
            Request::Barrier => bail!("NCCL has no barrier"),
        }
    }

    /// The fault of one of NCCL's own threads, if any; `None` while another thread uses the communicator.
    pub fn asynchronous_fault(&self) -> Option<anyhow::Error> {
        let raw = self.raw.try_lock().ok().filter(|raw| !raw.0.is_null())?;
        let mut state = 0;
        // SAFETY: the communicator is alive, and the pointer is to an integer that outlives the call.
        let code = unsafe { (self.api.comm_get_async_error)(raw.0, &mut state) };
        let asked = self.api.check(code, Some(raw.0)).context("asking NCCL for its state");
        let is_fault = state != ncclResult_t::ncclInProgress as c_int;
        asked.and_then(|()| if is_fault { self.api.check(state, Some(raw.0)) } else { Ok(()) }).err()
    }

    /// Ends the communicator with the other ranks, all of which must do the same. It has no time limit: the guard ends a
    /// process whose peers do not do it.
    ///
    /// # Errors
    /// NCCL's; the communicator has then been aborted.
    pub fn finalize(&self) -> Result<()> {
        let mut raw = self.lock();
        if raw.0.is_null() {
            return Ok(());
        }
        // SAFETY: alive, and no operation is under way: the caller has waited for its stream.
        let code = unsafe { (self.api.comm_finalize)(raw.0) };
        let finalized = self.api.check(code, Some(raw.0)).context("ending an NCCL communicator");
        let destroy = if finalized.is_ok() { self.api.comm_destroy } else { self.api.comm_abort };
        // SAFETY: alive, and not used after this.
        let code = unsafe { destroy(std::mem::replace(&mut raw.0, std::ptr::null_mut())) };
        finalized.and(self.api.check(code, None).context("freeing an NCCL communicator"))
    }

    /// Stops what is under way on the device and frees the communicator; the group cannot be used afterwards.
    ///
    /// Gives up and returns `false` if another thread holds the communicator for longer than `patience`.
    pub fn abort(&self, patience: Duration) -> bool {
        let started = Instant::now();
        loop {
            if let Ok(mut raw) = self.raw.try_lock() {
                let raw = std::mem::replace(&mut raw.0, std::ptr::null_mut());
                if !raw.is_null() {
                    // SAFETY: alive, and not used after this.
                    unsafe { (self.api.comm_abort)(raw) };
                }
                return true;
            }
            if started.elapsed() > patience {
                return false;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn lock(&self) -> MutexGuard<'_, Raw> {
        self.raw.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        self.abort(Duration::ZERO);
    }
}

/// NCCL's data type of a tensor's elements.
///
/// # Errors
/// Names an unsupported kind.
pub(super) fn data_type(tensor: &Tensor) -> Result<ncclDataType_t> {
    Ok(match tensor.kind() {
        Kind::Float => ncclDataType_t::ncclFloat32,
        Kind::BFloat16 => ncclDataType_t::ncclBfloat16,
        Kind::Half => ncclDataType_t::ncclFloat16,
        Kind::Int64 => ncclDataType_t::ncclInt64,
        other => bail!("collectives take Float, BFloat16, Half and Int64 tensors, not {other:?}"),
    })
}

fn reduction(op: Op) -> ncclRedOp_t {
    match op {
        Op::Sum => ncclRedOp_t::ncclSum,
        Op::Average => ncclRedOp_t::ncclAvg,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_dtype_has_nccls_number() {
        // The numbers of nccl.h 2.28.
        for (kind, number) in [(Kind::Half, 6), (Kind::Float, 7), (Kind::BFloat16, 9), (Kind::Int64, 4)] {
            let tensor = Tensor::zeros([1], (kind, Device::Cpu));
            assert_eq!(data_type(&tensor).unwrap() as i32, number, "{kind:?}");
        }
        let error = data_type(&Tensor::zeros([1], (Kind::Bool, Device::Cpu))).unwrap_err();
        assert!(error.to_string().contains("Bool"), "{error}");
        assert_eq!((reduction(Op::Sum) as u32, reduction(Op::Average) as u32), (0, 4));
    }
}
