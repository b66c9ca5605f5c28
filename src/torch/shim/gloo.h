// c10d's Gloo process group over a TCPStore.
#pragma once

#include "error.h"
#include "tensor.h"

#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace c10d {
class ProcessGroupGloo;
class Store;
class Work;
} // namespace c10d

namespace cs336 {

struct CompletionCallback; // the Rust type of bridge.rs

// Times are in milliseconds, because cxx cannot pass std::chrono types; 0 waits without a limit.

class GlooWork {
public:
  explicit GlooWork(c10::intrusive_ptr<c10d::Work> work);
  ~GlooWork();
  void wait(int64_t timeout_ms) const;
  // Calls the callback on the thread that ends the work, before any waiter continues.
  void when_done(rust::Box<CompletionCallback> callback) const;

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
  Pending all_gather(const std::vector<at::Tensor> &outputs, const std::vector<at::Tensor> &inputs) const;
  Pending reduce_scatter_sum(const std::vector<at::Tensor> &outputs, const std::vector<at::Tensor> &inputs) const;
  Pending barrier() const;

private:
  c10::intrusive_ptr<c10d::ProcessGroupGloo> group_;
};

// A key-value store served by one process of a run; safe to use from several threads.
class KeyStore {
public:
  explicit KeyStore(c10::intrusive_ptr<c10d::Store> store);
  ~KeyStore();
  void set(rust::Str key, rust::Slice<const uint8_t> value) const;
  // Waits until the key is set.
  std::unique_ptr<std::vector<uint8_t>> get(rust::Str key) const;
  bool has(rust::Str key) const;
  int64_t add(rust::Str key, int64_t number) const;
  // The same store, with `prefix` before each key.
  std::unique_ptr<KeyStore> under(rust::Str prefix) const;
  const c10::intrusive_ptr<c10d::Store> &inner() const { return store_; }

private:
  c10::intrusive_ptr<c10d::Store> store_;
};

// `listener` is a bound socket to serve the store on (taken over), or negative to be a client of it only.
std::unique_ptr<KeyStore> open_store(rust::Str host, uint16_t port, int32_t listener, int64_t timeout_ms);

// Peers reach this rank through the network interface of that name, or where it is empty at the address `host`.
std::unique_ptr<GlooGroup> connect_gloo(const KeyStore &store, rust::Str interface, rust::Str host, int32_t rank,
                                        int32_t world_size, int64_t timeout_ms);

} // namespace cs336
