//! One rank's NCCL communicator: forming it, launching collectives, and ending it cleanly or by an abort.

use std::ffi::{c_int, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use cudarc::nccl::sys::{ncclComm_t, ncclConfig_t, ncclDataType_t, ncclRedOp_t, ncclResult_t, ncclUniqueId};
use tch::{Device, Kind, Tensor};

use super::library::Api;
use crate::collective::Op;
use crate::cuda::{Stream, make_current};

/// What all ranks must agree on to form a communicator, and this rank's number.
pub(super) struct Membership {
    pub id: [u8; 128],
    pub rank: usize,
    pub world_size: usize,
    pub device: Device,
    pub timeout: Duration,
}

/// One operation of a group call.
#[derive(Clone, Copy)]
pub(super) enum Request<'a> {
    AllReduce { tensor: &'a Tensor, op: Op },
    Broadcast { tensor: &'a Tensor, root: usize },
    AllGather { output: &'a Tensor, input: &'a Tensor },
    ReduceScatter { output: &'a Tensor, input: &'a Tensor, op: Op },
}

pub(super) struct Communicator {
    api: &'static Api,
    /// Null once it has been destroyed or aborted. NCCL lets one thread at a time use a communicator.
    raw: Mutex<Raw>,
    timeout: Duration,
}

struct Raw(ncclComm_t);

// SAFETY: NCCL lets any thread use a communicator, one at a time, which the mutex ensures.
unsafe impl Send for Raw {}

/// The magic number and the undefined value of a config in nccl.h (NCCL_CONFIG_INITIALIZER).
const MAGIC: u32 = 0xcafe_beef;
const UNDEFINED: c_int = c_int::MIN;

/// How long [`Communicator::finalize`] may take if the communicator's calls do not block. In NCCL's default mode it has
/// no limit: the guard ends a process whose peers do not call it.
pub(super) const FINALIZE_LIMIT: Duration = Duration::from_secs(10);

impl Communicator {
    /// Forms a communicator with the other ranks, on its device.
    ///
    /// # Errors
    /// NCCL's; or the others have not arrived within the timeout.
    pub fn form(membership: Membership, is_blocking: bool) -> Result<Self> {
        let Membership { id, rank, world_size, device, timeout } = membership;
        let api = Api::get()?;
        let version = api.version()?;
        let (own, ranks) = (c_int::try_from(rank)?, c_int::try_from(world_size)?);
        let init = move || -> Result<(Raw, c_int)> {
            make_current(device)?;
            let mut config = config(version, is_blocking);
            let id = ncclUniqueId { internal: id.map(|byte| byte as _) };
            // NCCL's own thread writes the communicator there again once it is formed, however long that takes.
            let place: *mut ncclComm_t = Box::leak(Box::new(std::ptr::null_mut()));
            // SAFETY: the place is never freed, and the config, which NCCL copies, outlives the call.
            let code = unsafe { (api.comm_init_rank_config)(place, ranks, id, own, &mut config) };
            // SAFETY: the place is valid; the other writer writes the same value.
            Ok((Raw(unsafe { place.read_volatile() }), code))
        };
        // A blocking call returns only when the last rank has arrived, so another thread makes it and this one waits.
        let (sender, receiver) = mpsc::channel();
        let forming = std::thread::Builder::new().name("nccl-init".into()).spawn(move || sender.send(init()));
        forming.context("failed to start a thread that forms an NCCL communicator")?;
        let formed = receiver.recv_timeout(timeout).map_err(|_| late(timeout)).flatten().and_then(|(raw, code)| {
            let new = Self { api, raw: Mutex::new(raw), timeout };
            new.settle(&new.lock(), code)?;
            Ok(new)
        });
        formed.with_context(|| {
            format!("rank {rank} of {world_size} forming an NCCL communicator; set NCCL_DEBUG=INFO for details")
        })
    }

    /// Launches the requests on `stream` as one group, after the work that is already on it.
    ///
    /// The tensors' memory must stay valid until the stream has completed them.
    pub fn launch(&self, requests: &[Request], stream: &Stream) -> Result<()> {
        let raw = self.lock();
        ensure!(!raw.0.is_null(), "the communicator has been aborted");
        let call = || -> Result<c_int> {
            if let [request] = requests {
                return self.enqueue(&raw, *request, stream);
            }
            // SAFETY: no condition; ended below, on this thread, whether or not the requests fail.
            self.api.check(unsafe { (self.api.group_start)() }, Some(raw.0))?;
            let outcome = requests.iter().try_for_each(|request| {
                let code = self.enqueue(&raw, *request, stream)?;
                if code == ncclResult_t::ncclInProgress as c_int { Ok(()) } else { self.api.check(code, Some(raw.0)) }
            });
            // SAFETY: started above.
            let ended = unsafe { (self.api.group_end)() };
            outcome.map(|()| ended)
        };
        let code = stream.on_device(call)??;
        self.settle(&raw, code)
    }

    fn enqueue(&self, raw: &Raw, request: Request, stream: &Stream) -> Result<c_int> {
        let (api, stream) = (self.api, stream.as_ptr());
        let address = |tensor: &Tensor| -> *mut c_void { tensor.data_ptr() };
        // SAFETY: the communicator is alive. Each pointer is to that many contiguous elements of that type on the
        // communicator's device, valid until the stream has completed the call; the caller has checked both.
        Ok(unsafe {
            match request {
                Request::AllReduce { tensor, op } => {
                    let (at, kind) = (address(tensor), data_type(tensor)?);
                    (api.all_reduce)(at, at, tensor.numel(), kind, reduction(op), raw.0, stream)
                }
                Request::Broadcast { tensor, root } => {
                    let (at, kind) = (address(tensor), data_type(tensor)?);
                    (api.broadcast)(at, at, tensor.numel(), kind, c_int::try_from(root)?, raw.0, stream)
                }
                Request::AllGather { output, input } => {
                    let kind = data_type(input)?;
                    (api.all_gather)(address(input), address(output), input.numel(), kind, raw.0, stream)
                }
                Request::ReduceScatter { output, input, op } => {
                    let (from, to, kind) = (address(input), address(output), data_type(input)?);
                    (api.reduce_scatter)(from, to, output.numel(), kind, reduction(op), raw.0, stream)
                }
            }
        })
    }

    /// The fault of one of NCCL's own threads, if any; `None` while another thread uses the communicator.
    pub fn asynchronous_fault(&self) -> Option<anyhow::Error> {
        let raw = self.raw.try_lock().ok().filter(|raw| !raw.0.is_null())?;
        match self.state(&raw) {
            Ok(code) if code == ncclResult_t::ncclInProgress as c_int => None,
            Ok(code) => self.api.check(code, Some(raw.0)).err(),
            Err(error) => Some(error),
        }
    }

    /// Ends the communicator with the other ranks, all of which must do the same.
    ///
    /// # Errors
    /// The others have not arrived, or NCCL's; it has then been aborted.
    pub fn finalize(&self) -> Result<()> {
        let mut raw = self.lock();
        if raw.0.is_null() {
            return Ok(());
        }
        // SAFETY: alive, and no operation is under way: the caller has waited for its stream. The guard bounds the wait.
        let code = unsafe { (self.api.comm_finalize)(raw.0) };
        let finalized = self.settle_within(&raw, code, FINALIZE_LIMIT).context("ending an NCCL communicator");
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

    /// Waits for a call that NCCL completes on its own thread.
    fn settle(&self, raw: &Raw, code: c_int) -> Result<()> {
        self.settle_within(raw, code, self.timeout)
    }

    fn settle_within(&self, raw: &Raw, mut code: c_int, limit: Duration) -> Result<()> {
        let started = Instant::now();
        while code == ncclResult_t::ncclInProgress as c_int {
            if started.elapsed() > limit {
                return Err(late(limit));
            }
            // A launch completes within microseconds, and its time is measured, so this wait does not sleep.
            std::thread::yield_now();
            code = self.state(raw)?;
        }
        self.api.check(code, Some(raw.0))
    }

    fn state(&self, raw: &Raw) -> Result<c_int> {
        let mut state = 0;
        // SAFETY: the communicator is alive, and the pointer is to an integer that outlives the call.
        let code = unsafe { (self.api.comm_get_async_error)(raw.0, &mut state) };
        self.api.check(code, Some(raw.0)).context("asking NCCL for its state")?;
        Ok(state)
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

fn late(limit: Duration) -> anyhow::Error {
    anyhow!("the other ranks have not arrived within {:.1} s", limit.as_secs_f64())
}

/// As NCCL_CONFIG_INITIALIZER of nccl.h 2.28, except for `blocking`.
fn config(version: c_int, is_blocking: bool) -> ncclConfig_t {
    ncclConfig_t {
        size: size_of::<ncclConfig_t>(),
        magic: MAGIC,
        version: version as u32,
        blocking: c_int::from(is_blocking),
        cgaClusterSize: UNDEFINED,
        minCTAs: UNDEFINED,
        maxCTAs: UNDEFINED,
        netName: std::ptr::null(),
        splitShare: UNDEFINED,
        trafficClass: UNDEFINED,
        commName: std::ptr::null(),
        collnetEnable: UNDEFINED,
        CTAPolicy: UNDEFINED,
        shrinkShare: UNDEFINED,
        nvlsCTAs: UNDEFINED,
        nChannelsPerNetPeer: UNDEFINED,
        nvlinkCentricSched: UNDEFINED,
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

    #[test]
    fn the_config_is_that_of_the_header() {
        // sizeof(ncclConfig_t) of nccl.h 2.28.9, whose undefined pointer is null and whose undefined int is INT_MIN.
        let config = config(22809, false);
        assert_eq!((config.size, config.magic, config.version, config.blocking), (80, 0xcafe_beef, 22809, 0));
        assert!(config.netName.is_null() && config.commName.is_null() && config.nvlsCTAs == i32::MIN);
    }
}
