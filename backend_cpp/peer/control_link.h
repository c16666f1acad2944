// ControlLink: a node's place in the fleet: it registers, then beats. Private to peer and node.
//
// Beats go over one stream, which a beat opens: one when what the node says has changed, and one an
// interval after the last. Where the interval is longer than 200 ms, as the fleet is large, what
// has changed waits for up to half of the rest by chance, so that not all nodes beat at once. Where
// the control plane has no streams, each beat is a call.
//
// The control plane may be away: the link tries again, with each of its addresses in turn, and the
// node serves on.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "access/credentials.h"
#include "access/token_file.h"
#include "embertide/v1/control.pb.h"

namespace embertide {

class TaskBoard;

struct ControlLinkOptions {
  std::string address;  // host:port of the control plane; of several replicas, comma-separated
  std::shared_ptr<TokenFile> tokens = nullptr;  // OPTIONAL
  Credentials credentials = Credentials::PlainText();
  std::chrono::milliseconds retry_every{500};
  std::chrono::milliseconds look_every{200};         // whether what the node says has changed
  std::chrono::milliseconds longest_silence{15000};  // of a control plane; then another is tried
  TaskBoard* tasks = nullptr;  // OPTIONAL: told how the threads are doing, and why it is refused
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
  // Beats now, or soon in a large fleet: the node acts by a new plan, or holds more.
  void BeatNow();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace embertide
