// c10d's Gloo process group over a TCPStore.
#include "gloo.h"

#include "cs336/src/torch/bridge.rs.h"

#include <c10/util/Logging.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <torch/headeronly/version.h>

#include <mutex>
#include <sched.h>

// The wheel has ProcessGroupGloo.hpp but not the Gloo headers it includes; gloo_headers/ stands in for them.
// The stand-ins were checked against this version, in which all of Gloo's own types are behind pointers.
static_assert(TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR == 11,
              "check gloo_headers/ against this version of ProcessGroupGloo.hpp");

namespace cs336 {

using std::chrono::milliseconds;

namespace {

// What `start` starts. One thread at a time: c10d's recorder of collectives, which all groups of a process share, adds a group
// to a map without a lock, and crashed where ranks are threads (pytorch/pytorch#179313).
template <typename Start> Pending pending(Start start) {
  static std::mutex recorder;
  const std::lock_guard<std::mutex> lock(recorder);
  return std::make_unique<GlooWork>(start());
}

// While it exists, this thread has the batch scheduling policy, which threads that it starts keep: a thread that wakes
// up under it does not preempt another one.
//
// Gloo's device thread polls a connection's lock while another thread holds it to send (gloo/transport/tcp/pair.cc,
// handleEvents). If it preempts the sender on its processor, the sender cannot go on. With 2 ranks on two cores, a sum
// of 1 MB then took twice as long, and 1.4 ms of processor time instead of 0.4 ms.
class BatchScheduling {
public:
  BatchScheduling() : changed_(sched_getscheduler(0) == SCHED_OTHER && set(SCHED_BATCH)) {}
  BatchScheduling(const BatchScheduling &) = delete;
  BatchScheduling &operator=(const BatchScheduling &) = delete;
  ~BatchScheduling() {
    if (changed_) {
      set(SCHED_OTHER);
    }
  }

private:
  static bool set(int policy) {
    const sched_param none{};
    return sched_setscheduler(0, policy, &none) == 0;
  }

  const bool changed_;
};

} // namespace

GlooWork::GlooWork(c10::intrusive_ptr<c10d::Work> work) : work_(std::move(work)) {}
GlooWork::~GlooWork() = default;

// kNoTimeout is zero milliseconds.
void GlooWork::wait(int64_t timeout_ms) const { work_->wait(milliseconds(timeout_ms)); }

void GlooWork::when_done(rust::Box<CompletionCallback> callback) const {
  // A callback must be copyable, which a box is not.
  auto shared = std::make_shared<rust::Box<CompletionCallback>>(std::move(callback));
  work_->getFuture()->addCallback([shared](c10::ivalue::Future &) { (*shared)->call(); });
}

GlooGroup::GlooGroup(c10::intrusive_ptr<c10d::ProcessGroupGloo> group) : group_(std::move(group)) {}
GlooGroup::~GlooGroup() = default;

Pending GlooGroup::all_reduce_sum(const std::vector<at::Tensor> &tensors) const {
  auto list = tensors;
  // Plain allreduce treats several tensors as copies on several devices, and adds them together.
  return pending([&] { return list.size() == 1 ? group_->allreduce(list) : group_->allreduce_coalesced(list); });
}

Pending GlooGroup::broadcast(const at::Tensor &tensor, int32_t root) const {
  std::vector<at::Tensor> list{tensor};
  c10d::BroadcastOptions options;
  options.rootRank = root;
  return pending([&] { return group_->broadcast(list, options); });
}

Pending GlooGroup::all_gather(const std::vector<at::Tensor> &outputs, const std::vector<at::Tensor> &inputs) const {
  auto wholes = outputs, shares = inputs;
  return pending([&] { return group_->allgather_into_tensor_coalesced(wholes, shares); });
}

Pending GlooGroup::reduce_scatter_sum(const std::vector<at::Tensor> &outputs,
                                      const std::vector<at::Tensor> &inputs) const {
  auto shares = outputs, wholes = inputs;
  return pending([&] { return group_->reduce_scatter_tensor_coalesced(shares, wholes); });
}

Pending GlooGroup::barrier() const {
  return pending([&] { return group_->barrier(); });
}

KeyStore::KeyStore(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}
KeyStore::~KeyStore() = default;

void KeyStore::set(rust::Str key, rust::Slice<const uint8_t> value) const {
  store_->set(std::string(key), std::vector<uint8_t>(value.begin(), value.end()));
}

std::unique_ptr<std::vector<uint8_t>> KeyStore::get(rust::Str key) const {
  return std::make_unique<std::vector<uint8_t>>(store_->get(std::string(key)));
}

bool KeyStore::has(rust::Str key) const { return store_->check({std::string(key)}); }

int64_t KeyStore::add(rust::Str key, int64_t number) const { return store_->add(std::string(key), number); }

std::unique_ptr<KeyStore> KeyStore::under(rust::Str prefix) const {
  return std::make_unique<KeyStore>(c10::make_intrusive<c10d::PrefixStore>(std::string(prefix), store_));
}

std::unique_ptr<KeyStore> open_store(rust::Str host, uint16_t port, int32_t listener, int64_t timeout_ms) {
  // c10d logs each attempt that fails, with the stack of its exception; what fails for good we get as an exception, and name.
  static const bool quiet = [] {
    c10::SetStackTraceFetcher([] { return std::string(); });
    // Not where TORCH_CPP_LOG_LEVEL asks for more or less.
    if (FLAGS_caffe2_log_level == c10::GLOG_WARNING) {
      FLAGS_caffe2_log_level = c10::GLOG_FATAL;
    }
    return true;
  }();
  (void)quiet;
  c10d::TCPStoreOptions options;
  options.port = port;
  options.isServer = listener >= 0;
  if (options.isServer) {
    options.masterListenFd = listener;
  }
  options.waitWorkers = false;
  options.timeout = milliseconds(timeout_ms);
  return std::make_unique<KeyStore>(c10::make_intrusive<c10d::TCPStore>(std::string(host), options));
}

std::unique_ptr<GlooGroup> connect_gloo(const KeyStore &store, rust::Str interface, rust::Str host, int32_t rank,
                                        int32_t world_size, int64_t timeout_ms) {
  using c10d::ProcessGroupGloo;
  auto options = ProcessGroupGloo::Options::create(milliseconds(timeout_ms));
  // One collective at a time, in the order of the calls, as on a CUDA stream: the timeline relies on it.
  options->threads = 1;
  // Not createDefaultDevice: it resolves this machine's own host name, which fails in a sandbox.
  {
    const BatchScheduling thread;
    options->devices.push_back(interface.empty()
                                   ? ProcessGroupGloo::createDeviceForHostname(std::string(host))
                                   : ProcessGroupGloo::createDeviceForInterface(std::string(interface)));
  }
  auto group = c10::make_intrusive<ProcessGroupGloo>(store.inner(), rank, world_size, options);
  return std::make_unique<GlooGroup>(std::move(group));
}

} // namespace cs336
