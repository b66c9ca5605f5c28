// c10d's Gloo process group over a TCPStore.
#pragma once

#include "error.h"
#include "tensor.h"

#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <memory>

namespace c10d {
class ProcessGroupGloo;
class TCPStore;
class Work;
} // namespace c10d

namespace cs336 {

// Milliseconds stand for std::chrono's, which cxx does not know; 0 waits without a limit.

class GlooWork {
public:
  explicit GlooWork(c10::intrusive_ptr<c10d::Work> work);
  ~GlooWork();
  void wait(int64_t timeout_ms) const;
  bool is_completed() const;

private:
  c10::intrusive_ptr<c10d::Work> work_;
};

using Pending = std::unique_ptr<GlooWork>;

class GlooGroup {
public:
  explicit GlooGroup(c10::intrusive_ptr<c10d::ProcessGroupGloo> group);
  ~GlooGroup();
  Pending all_reduce_sum(const std::vector<at::Tensor> &tensors) const;
  Pending broadcast(const at::Tensor &tensor, int32_t root) const;
  Pending all_gather(const std::vector<at::Tensor> &outputs, const at::Tensor &input) const;
  Pending reduce_scatter_sum(const at::Tensor &output, const at::Tensor &input) const;
  Pending barrier() const;

private:
  c10::intrusive_ptr<c10d::ProcessGroupGloo> group_;
};

class StoreServer {
public:
  explicit StoreServer(c10::intrusive_ptr<c10d::TCPStore> store);
  ~StoreServer();

private:
  c10::intrusive_ptr<c10d::TCPStore> store_;
};

// Serves a store on the bound socket `listener`, which it takes over, and waits for nobody.
std::unique_ptr<StoreServer> serve_store(rust::Str host, uint16_t port, int32_t listener, int64_t timeout_ms);

// `listener` is a bound socket to serve the store on (taken over), or negative to be a client of it only.
std::unique_ptr<GlooGroup> connect_gloo(rust::Str host, uint16_t port, int32_t listener, int32_t rank,
                                        int32_t world_size, int64_t timeout_ms);

} // namespace cs336
