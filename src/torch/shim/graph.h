// Side streams, and captured work of a stream as a CUDA graph that can be launched again.
#pragma once

#include "error.h"
#include "rust/cxx.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <memory>

// The CUDA runtime's own types, of which only pointers are kept here.
struct CUstream_st;
struct CUgraphExec_st;

namespace cs336 {

struct AddressRange;

// While it lives, the calling thread's operators go to the side stream of `device`: one stream for the whole process, so
// that what libtorch keeps by stream (cuBLAS workspaces) is found again. It must die on the thread that made it.
class SideStream {
public:
  explicit SideStream(int8_t device);
  ~SideStream();
  SideStream(const SideStream &) = delete;
  SideStream &operator=(const SideStream &) = delete;

private:
  c10::Stream before_;
};

std::unique_ptr<SideStream> enter_side_stream(int8_t device);

// One capture: `begin`, work, then `end`; after `end`, any number of `replay`s.
class CudaGraph {
public:
  explicit CudaGraph(int8_t device);
  // Ends a capture that is under way, waits for the device, then frees the graph and its memory.
  ~CudaGraph();
  CudaGraph(const CudaGraph &) = delete;
  CudaGraph &operator=(const CudaGraph &) = delete;

  // From here on the current stream records its work instead of doing it, and tensors come from the graph's own pool.
  void begin();
  // Throws where the work cannot be kept; the capture is over either way. Fills with zero of a part of `cleared` are left out.
  void end(rust::Slice<const AddressRange> cleared);
  // Launches the kept work on the calling thread's current stream.
  void replay() const;
  // Kernels, copies and fills of the graph.
  uint64_t num_nodes() const;

private:
  // Ends the capture and keeps nothing.
  void abandon() noexcept;
  void end_pool();

  c10::Device device_;
  c10::MempoolId_t pool_{0, 0};
  CUstream_st *stream_ = nullptr;
  bool capturing_ = false;
  bool holds_pool_ = false;
  CUgraphExec_st *executable_ = nullptr;
  uint64_t num_nodes_ = 0;
};

std::unique_ptr<CudaGraph> new_cuda_graph(int8_t device);

} // namespace cs336
