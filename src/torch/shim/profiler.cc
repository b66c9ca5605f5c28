// libtorch's profiler: Kineto traces, ranges for any of its collectors, and NVTX ranges for external profilers.
#include "cs336/src/torch/bridge.rs.h"

#include <torch/csrc/autograd/profiler_kineto.h>

#include <set>
#include <string>
#include <string_view>
#include <utility>

namespace cs336 {

namespace profiler = torch::autograd::profiler;
using torch::profiler::impl::ActivityType;
using torch::profiler::impl::ProfilerConfig;
using torch::profiler::impl::ProfilerState;

UserScope::UserScope(std::string name) : name_(std::move(name)), record_(at::RecordScope::USER_SCOPE) {
  if (record_.isActive()) {
    record_.before(std::string_view(name_));
  }
}

std::unique_ptr<UserScope> open_user_scope(rust::Str name) noexcept {
  return std::make_unique<UserScope>(std::string(name));
}

void start_kineto(bool is_cuda) {
  const ProfilerConfig config(ProfilerState::KINETO);
  std::set<ActivityType> activities{ActivityType::CPU};
  if (is_cuda) {
    activities.insert(ActivityType::CUDA);
  }
  profiler::prepareProfiler(config, activities);
  profiler::enableProfiler(
      config, activities,
      {at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION, at::RecordScope::USER_SCOPE});
}

void start_nvtx() {
  profiler::enableProfiler(ProfilerConfig(ProfilerState::NVTX), {ActivityType::CPU, ActivityType::CUDA},
                           {at::RecordScope::USER_SCOPE});
}

void stop_profiler(rust::Str path) {
  const auto result = profiler::disableProfiler();
  if (!path.empty()) {
    result->save(std::string(path));
  }
}

} // namespace cs336
