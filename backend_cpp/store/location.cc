// The meaning of an index entry's place at a version.
#include "store/location.h"

namespace embertide {

Location Resolve(Location location, uint64_t version, uint64_t* changed_at) {
  if (!location.is_chain()) return location;
  for (const VersionNode* node = location.chain(); node != nullptr;
       node = node->older.load(std::memory_order_acquire)) {
    if (node->version <= version) {
      if (changed_at != nullptr) *changed_at = node->version;
      return Location::FromWord(node->word.load(std::memory_order_acquire));
    }
  }
  return {};
}

}  // namespace embertide
