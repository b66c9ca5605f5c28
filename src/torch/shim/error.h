// How C++ exceptions become Rust errors and Rust errors travel through C++ frames.
#pragma once

#include <rust/cxx.h>

#include <memory>
#include <stdexcept>
#include <string>

namespace cs336 {

struct Outcome; // the Rust type of bridge.rs

// Carries a failed Rust callback's error through libtorch's frames and threads to the caller.
class CallbackFailure : public std::runtime_error {
public:
  explicit CallbackFailure(rust::Box<Outcome> outcome);
  const Outcome &outcome() const;

private:
  // An exception is copied by std::exception_ptr's rethrow; the Rust error is not copyable.
  std::shared_ptr<rust::Box<Outcome>> outcome_;
};

// Throws CallbackFailure if the Rust callback failed.
void check(rust::Box<Outcome> outcome);

// The message of the exception being handled; keeps a type that Rust can restore in bridge.rs's PENDING.
std::string describe_current_exception() noexcept;

} // namespace cs336

namespace rust::behavior {

// cxx calls this around every C++ function that bridge.rs declares as returning `Result`.
template <typename Try, typename Fail> static void trycatch(Try &&func, Fail &&fail) noexcept {
  try {
    func();
  } catch (...) {
    fail(::cs336::describe_current_exception());
  }
}

} // namespace rust::behavior
