// How C++ exceptions become Rust errors and Rust errors travel through C++ frames.
#include "cs336/src/torch/bridge.rs.h"

#include <c10/util/Exception.h>

namespace cs336 {

CallbackFailure::CallbackFailure(rust::Box<Outcome> outcome)
    : std::runtime_error(std::string(outcome->message())),
      outcome_(std::make_shared<rust::Box<Outcome>>(std::move(outcome))) {}

const Outcome &CallbackFailure::outcome() const { return **outcome_; }

void check(rust::Box<Outcome> outcome) {
  if (outcome->failed()) {
    throw CallbackFailure(std::move(outcome));
  }
}

std::string describe_current_exception() noexcept {
  try {
    throw;
  } catch (const CallbackFailure &failure) {
    failure.outcome().save_error();
    return failure.what();
  } catch (const c10::OutOfMemoryError &error) {
    save_out_of_memory();
    return error.what_without_backtrace();
  } catch (const c10::Error &error) {
    return error.what_without_backtrace();
  } catch (const std::exception &error) {
    return error.what();
  } catch (...) {
    return "a C++ exception that is no std::exception";
  }
}

} // namespace cs336
