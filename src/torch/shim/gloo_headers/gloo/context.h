// Stand-in for gloo::Context, which the wheel's headers mention and its library holds: only what they mention.
//
// Never construct one here: the real class is larger. It is made and used inside libtorch.
#pragma once

#include <chrono>

namespace gloo {

class Context {
public:
  void setTimeout(std::chrono::milliseconds timeout);
};

} // namespace gloo
