// ControlLink: a node's place in the fleet: it registers, then beats. Private to peer and node.
//
// The control plane may be away: the link tries again, and the node serves on.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "embertide/v1/control.pb.h"

namespace embertide {

struct ControlLinkOptions {
  std::string address;  // host:port of the control plane
  std::string token;
  std::chrono::milliseconds retry_every{500};
};

class ControlLink {
 public:
  // `registration` without a request_id: the link makes one. `beat` fills in what a heartbeat says,
  // but for node, incarnation and sequence; called from the link's thread.
  ControlLink(ControlLinkOptions options, v1::RegisterNodeRequest registration,
              std::function<void(v1::HeartbeatRequest*)> beat);
  ~ControlLink();
  ControlLink(const ControlLink&) = delete;
  ControlLink& operator=(const ControlLink&) = delete;

  // Why the control plane refused this node for good (a configuration error); empty otherwise.
  std::string refusal() const;
  // Beats now: the node acts by a new plan, or holds more.
  void BeatNow();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace embertide
