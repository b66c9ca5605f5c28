// Side streams, and captured work of a stream as a CUDA graph that can be launched again.
//
// libtorch's own at::cuda::CUDAGraph does the same, but in 2.11 a capture that fails leaves the allocator and the random
// generator as if it were still under way. Here the order is that of CUDAGraph::capture_begin and capture_end; random
// numbers, which need the generator's cooperation, are left out: drawing them during a capture fails.
#include "graph.h"

#include <ATen/Context.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/cuda/CUDACachingAllocator.h>

#include "cs336/src/torch/bridge.rs.h"

#include <dlfcn.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

namespace cs336 {

namespace {

// The CUDA runtime's functions in use. The runtime comes with libtorch's CUDA half at run time and is not linked.
template <typename Function> Function *find(const char *name) {
  auto *found = dlsym(RTLD_DEFAULT, name);
  if (found == nullptr) {
    throw std::runtime_error(std::string(name) + " is not loaded: is this libtorch's CUDA build?");
  }
  return reinterpret_cast<Function *>(found);
}

#define CS336_FUNCTION(name) decltype(::name) *name = find<decltype(::name)>(#name)
struct Runtime {
  CS336_FUNCTION(cudaGetErrorString);
  CS336_FUNCTION(cudaGetLastError);
  CS336_FUNCTION(cudaStreamBeginCapture);
  CS336_FUNCTION(cudaStreamEndCapture);
  CS336_FUNCTION(cudaGraphGetNodes);
  CS336_FUNCTION(cudaGraphNodeGetType);
  CS336_FUNCTION(cudaGraphMemsetNodeGetParams);
  CS336_FUNCTION(cudaGraphNodeGetDependencies);
  CS336_FUNCTION(cudaGraphNodeGetDependentNodes);
  CS336_FUNCTION(cudaGraphAddDependencies);
  CS336_FUNCTION(cudaGraphDestroyNode);
  CS336_FUNCTION(cudaGraphInstantiateWithFlags);
  CS336_FUNCTION(cudaGraphDestroy);
  CS336_FUNCTION(cudaGraphLaunch);
  CS336_FUNCTION(cudaGraphExecDestroy);
  // libtorch's counter of memory pools, so that no other graph's pool has our number.
  c10::MempoolId_t (*graph_pool_handle)() = find<c10::MempoolId_t()>("_ZN2at4cuda17graph_pool_handleEv");
};
#undef CS336_FUNCTION

const Runtime &runtime() {
  static const Runtime loaded;
  return loaded;
}

void check_cuda(cudaError_t code, const char *call) {
  if (code == cudaSuccess) {
    return;
  }
  // Cleared, or libtorch would report it as its next kernel's error.
  runtime().cudaGetLastError();
  throw std::runtime_error(std::string(call) + ": " + runtime().cudaGetErrorString(code));
}

c10::cuda::CUDACachingAllocator::CUDAAllocator &pool_allocator() {
  at::globalContext().lazyInitDevice(at::kCUDA);
  return *static_cast<c10::cuda::CUDACachingAllocator::CUDAAllocator *>(c10::getDeviceAllocator(at::kCUDA));
}

c10::impl::VirtualGuardImpl cuda() { return c10::impl::VirtualGuardImpl(at::kCUDA); }

cudaStream_t current_stream(c10::Device device) {
  return static_cast<cudaStream_t>(cuda().getStream(device).native_handle());
}

c10::Stream side_stream(c10::Device device) {
  static std::mutex mutex;
  static std::map<c10::DeviceIndex, c10::Stream> streams;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto known = streams.find(device.index());
  return known != streams.end() ? known->second
                                : streams.emplace(device.index(), cuda().getStreamFromGlobalPool(device)).first->second;
}

std::vector<cudaGraphNode_t> nodes_of(cudaGraph_t graph) {
  size_t count = 0;
  check_cuda(runtime().cudaGraphGetNodes(graph, nullptr, &count), "cudaGraphGetNodes");
  std::vector<cudaGraphNode_t> nodes(count);
  check_cuda(runtime().cudaGraphGetNodes(graph, nodes.data(), &count), "cudaGraphGetNodes");
  return nodes;
}

bool clears_part_of(cudaGraphNode_t node, rust::Slice<const AddressRange> cleared) {
  auto type = cudaGraphNodeTypeEmpty;
  check_cuda(runtime().cudaGraphNodeGetType(node, &type), "cudaGraphNodeGetType");
  if (type != cudaGraphNodeTypeMemset) {
    return false;
  }
  cudaMemsetParams fill{};
  check_cuda(runtime().cudaGraphMemsetNodeGetParams(node, &fill), "cudaGraphMemsetNodeGetParams");
  const auto first = reinterpret_cast<uint64_t>(fill.dst), end = first + fill.width * fill.elementSize;
  return fill.value == 0 && fill.height == 1 && std::any_of(cleared.begin(), cleared.end(), [&](const AddressRange &range) {
           const bool is_all = first == range.first && end == range.end;
           return first >= range.first && end <= range.end && !is_all;
         });
}

// The nodes that `list` (cudaGraphNodeGetDependencies or cudaGraphNodeGetDependentNodes) has for `node`.
template <typename List> std::vector<cudaGraphNode_t> neighbours(List *list, cudaGraphNode_t node) {
  size_t count = 0;
  check_cuda(list(node, nullptr, nullptr, &count), "listing a node's neighbours");
  std::vector<cudaGraphNode_t> nodes(count);
  check_cuda(list(node, nodes.data(), nullptr, &count), "listing a node's neighbours");
  return nodes;
}

// What follows them follows what they followed.
void leave_out_fills(cudaGraph_t graph, rust::Slice<const AddressRange> cleared) {
  for (const auto node : nodes_of(graph)) {
    if (!clears_part_of(node, cleared)) {
      continue;
    }
    for (const auto before : neighbours(runtime().cudaGraphNodeGetDependencies, node)) {
      for (const auto after : neighbours(runtime().cudaGraphNodeGetDependentNodes, node)) {
        check_cuda(runtime().cudaGraphAddDependencies(graph, &before, &after, nullptr, 1), "cudaGraphAddDependencies");
      }
    }
    check_cuda(runtime().cudaGraphDestroyNode(node), "cudaGraphDestroyNode");
  }
}

} // namespace

SideStream::SideStream(int8_t device) : before_(cuda().exchangeStream(side_stream({at::kCUDA, device}))) {}

SideStream::~SideStream() { cuda().exchangeStream(before_); }

std::unique_ptr<SideStream> enter_side_stream(int8_t device) { return std::make_unique<SideStream>(device); }

CudaGraph::CudaGraph(int8_t device) : device_(at::kCUDA, device) { runtime(); }

CudaGraph::~CudaGraph() {
  if (capturing_) {
    abandon();
  }
  try {
    cuda().synchronizeDevice(device_.index());
    if (executable_ != nullptr) {
      check_cuda(runtime().cudaGraphExecDestroy(executable_), "cudaGraphExecDestroy");
    }
    if (holds_pool_) {
      pool_allocator().releasePool(device_.index(), pool_);
    }
  } catch (const std::exception &error) {
    TORCH_WARN("freeing a CUDA graph: ", error.what());
  }
}

void CudaGraph::begin() {
  stream_ = current_stream(device_);
  pool_ = runtime().graph_pool_handle();
  const auto stream = stream_;
  pool_allocator().beginAllocateToPool(device_.index(), pool_, [stream](cudaStream_t asking) { return asking == stream; });
  holds_pool_ = true;
  capturing_ = true;
  // Other threads may go on using the device.
  const auto code = runtime().cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal);
  if (code != cudaSuccess) {
    capturing_ = false;
    end_pool();
    check_cuda(code, "cudaStreamBeginCapture");
  }
}

void CudaGraph::end(rust::Slice<const AddressRange> cleared) {
  cudaGraph_t graph = nullptr;
  const auto ended = runtime().cudaStreamEndCapture(stream_, &graph);
  capturing_ = false;
  end_pool();
  check_cuda(ended, "cudaStreamEndCapture");
  const std::unique_ptr<std::remove_pointer_t<cudaGraph_t>, decltype(runtime().cudaGraphDestroy)> owner(
      graph, runtime().cudaGraphDestroy);
  leave_out_fills(graph, cleared);
  num_nodes_ = nodes_of(graph).size();
  check_cuda(runtime().cudaGraphInstantiateWithFlags(&executable_, graph, 0), "cudaGraphInstantiateWithFlags");
}

void CudaGraph::abandon() noexcept {
  cudaGraph_t graph = nullptr;
  // Fails if an error has invalidated the capture, but ends it.
  runtime().cudaStreamEndCapture(stream_, &graph);
  runtime().cudaGetLastError();
  if (graph != nullptr) {
    runtime().cudaGraphDestroy(graph);
  }
  try {
    end_pool();
  } catch (const std::exception &error) {
    TORCH_WARN("abandoning a CUDA graph: ", error.what());
  }
}

void CudaGraph::replay() const {
  if (executable_ == nullptr) {
    throw std::logic_error("a CUDA graph whose capture did not end cannot be replayed");
  }
  check_cuda(runtime().cudaGraphLaunch(executable_, current_stream(device_)), "cudaGraphLaunch");
}

uint64_t CudaGraph::num_nodes() const { return num_nodes_; }

void CudaGraph::end_pool() { pool_allocator().endAllocateToPool(device_.index(), pool_); }

std::unique_ptr<CudaGraph> new_cuda_graph(int8_t device) { return std::make_unique<CudaGraph>(device); }

} // namespace cs336
