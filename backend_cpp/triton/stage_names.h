// Names by which the front asks the backend, and is told, when the work on a request began, and how
// long its parts took. The parameters go between the two in one process; callers see none.
#pragma once

namespace embertide::triton {

// Parameter of a request, true: its stages are wanted.
inline constexpr const char* kAskStages = "embertide_stages";
// Each parameter of a response that is no caller's begins so.
inline constexpr const char* kStagePrefix = "embertide_stage_";
// Steady clock, in ns, when the group of requests that it is answered with had its turn.
inline constexpr const char* kStageBegan = "embertide_stage_began_ns";
// How long, in ns, that group's ...
inline constexpr const char* kStagePeers = "embertide_stage_peers_ns";    // rows of peers took
inline constexpr const char* kStageLookup = "embertide_stage_lookup_ns";  // rows of this node
inline constexpr const char* kStageNet = "embertide_stage_net_ns";        // dense net

}  // namespace embertide::triton
