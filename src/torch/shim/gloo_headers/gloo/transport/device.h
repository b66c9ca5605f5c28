// Stand-ins for Gloo's transport classes, which pass through our hands only behind pointers.
#pragma once

namespace gloo::transport {

class Device;

class UnboundBuffer {
public:
  virtual ~UnboundBuffer();
};

} // namespace gloo::transport
