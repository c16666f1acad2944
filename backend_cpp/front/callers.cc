#include "front/callers.h"

namespace embertide::front {

Callers::Caller* Callers::Enter(const std::string& name) {
  const std::lock_guard lock(mutex_);
  const auto [at, is_new] = callers_.try_emplace(name, limits_.bytes);
  Caller& caller = at->second;
  if (is_new) caller.name_ = &at->first;
  if (caller.calls_ >= limits_.calls) return nullptr;
  ++caller.calls_;
  return &caller;
}

void Callers::Leave(Caller* caller) {
  const std::lock_guard lock(mutex_);
  if (--caller->calls_ > 0) return;
  callers_.erase(callers_.find(*caller->name_));
}

}  // namespace embertide::front
