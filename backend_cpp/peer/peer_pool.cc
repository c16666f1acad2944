// Connections, beats and calls that carry parts of several requests.
#include "peer/peer_pool.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <thread>

#include "embertide/v1/node.grpc.pb.h"
#include "peer/limits.h"

namespace embertide {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint32_t kCallsAtOnce = 2;  // more wait, and are put together
// Parts that wait for one peer; further ones fail: it is slower than what is asked of it.
constexpr size_t kMaxWaiting = 4096;

// One Lookup of the caller's: `done` when its last part is.
struct Batch {
  std::atomic<size_t> left{0};
  std::function<void()> done;
  void Finish() {
    if (--left == 0) done();
  }
};

struct Waiting {
  PartCall* part;
  std::shared_ptr<Batch> batch;
  Clock::time_point deadline;
  Clock::time_point since;
};

Status StatusOf(const grpc::Status& status, const std::string& peer) {
  const std::string message = "node " + peer + ": " + status.error_message();
  switch (status.error_code()) {
    case grpc::StatusCode::INVALID_ARGUMENT:
      return {Code::kInvalidArgument, message};
    case grpc::StatusCode::DATA_LOSS:
      return {Code::kCorrupt, message};
    default:
      return {Code::kUnavailable, message};
  }
}

struct Peer {
  std::string name;
  std::string address;
  std::unique_ptr<v1::NodeService::Stub> stub;

  mutable std::mutex mutex;
  std::deque<Waiting> waiting;
  size_t waiting_bytes = 0;
  uint64_t epoch = 0;  // of the newest caller
  uint32_t calls = 0;
  bool beat_under_way = false;
  bool beat_again = false;  // as soon as that one is over
  // What is known of it. One that was never heard of is asked, for as long as beats may be missed.
  bool heard_of = false;
  bool lives = false;
  uint64_t oldest = 0;
  uint64_t newest = 0;
  uint64_t lineage = 0;         // of newest
  Clock::time_point newest_at;  // when `newest` was learned
  Clock::time_point heard;
  Clock::time_point beaten;
};

struct Call {
  grpc::ClientContext context;
  v1::LookupRequest request;
  v1::LookupResponse response;
  std::vector<Waiting> parts;
  std::shared_ptr<Peer> peer;
  Clock::time_point begun = Clock::now();
};

// Whether it can answer at a version. A version of the same number and another lineage is another.
bool Has(const Peer& peer, uint64_t version, uint64_t lineage) {
  if (!peer.lives || version < peer.oldest || version > peer.newest) return false;
  return version < peer.newest || lineage == peer.lineage;
}

}  // namespace

struct PeerPool::Impl {
  PeerPoolOptions options;
  std::function<v1::VersionRange()> versions;
  std::function<uint64_t()> epoch;
  PeerStats stats;

  mutable std::mutex mutex;
  std::condition_variable wake;
  bool stop = false;
  bool beat_now = false;
  bool flush = false;  // something waits for its 200 us
  std::map<std::string, std::shared_ptr<Peer>> peers;
  size_t under_way = 0;
  std::condition_variable idle;
  std::thread thread;

  std::vector<std::shared_ptr<Peer>> All() const {
    const std::lock_guard lock(mutex);
    std::vector<std::shared_ptr<Peer>> all;
    all.reserve(peers.size());
    for (const auto& [name, peer] : peers) all.push_back(peer);
    return all;
  }
  std::shared_ptr<Peer> Find(const std::string& name) const {
    const std::lock_guard lock(mutex);
    const auto found = peers.find(name);
    return found == peers.end() ? nullptr : found->second;
  }

  void Run();
  // `again`: if a beat is under way, another one follows it.
  void Beat(const std::shared_ptr<Peer>& peer, bool again);
  void SendWaiting(const std::shared_ptr<Peer>& peer, bool now);
  void Send(std::unique_ptr<Call> call);
  void Answered(Call* call, const grpc::Status& status);
  void Learn(Peer* peer, const v1::VersionRange& range, const Call* answered);
  void Missed(Peer* peer);
};

// `answered`: the call that it answered; null: it called.
void PeerPool::Impl::Learn(Peer* peer, const v1::VersionRange& range, const Call* answered) {
  const std::lock_guard lock(peer->mutex);
  // One that calls may be out of reach for our calls all the same.
  if (answered == nullptr && !peer->lives) return;
  peer->heard = Clock::now();
  peer->heard_of = true;
  // Answers overtake each other: only a call that began later can say less than is known.
  const bool later = answered != nullptr && answered->begun >= peer->newest_at;
  if (range.newest().number() >= peer->newest || later) {
    peer->oldest = range.oldest().number();
    peer->newest = range.newest().number();
    peer->lineage = range.newest().lineage();
    peer->newest_at = peer->heard;
  }
  peer->lives = peer->newest > 0;
}

// It may have been busy; it is dead once it said nothing for as long as its beats last.
void PeerPool::Impl::Missed(Peer* peer) {
  ++stats.failed;
  const std::lock_guard lock(peer->mutex);
  if (!peer->lives && peer->heard_of) return;
  if (Clock::now() - peer->heard < options.beat_every * options.dead_after_beats) return;
  peer->lives = false;
  peer->heard_of = true;
  ++stats.deaths;
}

void PeerPool::Impl::Send(std::unique_ptr<Call> call) {
  {
    const std::lock_guard lock(mutex);
    ++under_way;
  }
  if (!options.token.empty()) {
    call->context.AddMetadata("authorization", "Bearer " + options.token);
  }
  call->request.set_asker(options.name);
  *call->request.mutable_asker_versions() = versions();
  Call* raw = call.release();
  raw->peer->stub->async()->Lookup(&raw->context, &raw->request, &raw->response,
                                   [this, raw](const grpc::Status& status) {
                                     const std::unique_ptr<Call> owned(raw);
                                     Answered(owned.get(), status);
                                     const std::lock_guard lock(mutex);
                                     if (--under_way == 0) idle.notify_all();
                                   });
}

void PeerPool::Impl::Answered(Call* call, const grpc::Status& status) {
  if (status.ok()) {
    Learn(call->peer.get(), call->response.versions(), call);
  } else {
    Missed(call->peer.get());
  }
  const bool beat = call->parts.empty();
  bool again = false;
  {
    const std::lock_guard lock(call->peer->mutex);
    if (beat) {
      call->peer->beat_under_way = false;
      again = call->peer->beat_again;
    } else {
      --call->peer->calls;
    }
  }
  const bool whole =
      status.ok() && call->response.results_size() == static_cast<int>(call->parts.size());
  for (size_t i = 0; i < call->parts.size(); ++i) {
    PartCall* part = call->parts[i].part;
    part->epoch = call->response.plan_epoch();
    if (whole) {
      part->result.Swap(call->response.mutable_results(static_cast<int>(i)));
    } else if (status.ok()) {
      part->status = {Code::kUnavailable, "node " + call->peer->name + " answered other parts"};
    } else {
      part->status = StatusOf(status, call->peer->name);
    }
  }
  if (!beat) SendWaiting(call->peer, /*now=*/true);
  if (again) Beat(call->peer, /*again=*/false);
  for (const Waiting& each : call->parts) each.batch->Finish();
}

// Sends what waits for a peer, as much as a call may carry: at once while few calls are under way.
void PeerPool::Impl::SendWaiting(const std::shared_ptr<Peer>& peer, bool now) {
  while (true) {
    auto call = std::make_unique<Call>();
    {
      const std::lock_guard lock(peer->mutex);
      if (peer->waiting.empty()) return;
      const bool due = now || peer->waiting_bytes >= kCoalesceBytes ||
                       Clock::now() - peer->waiting.front().since >= options.coalesce;
      if (peer->calls >= kCallsAtOnce && !due) return;
      size_t keys = 0;
      size_t answer = 0;
      size_t question = 0;
      Clock::time_point deadline = peer->waiting.front().deadline;
      while (!peer->waiting.empty() && call->parts.size() < kMaxPartsACall) {
        const Waiting& next = peer->waiting.front();
        keys += static_cast<size_t>(next.part->part.keys_size());
        answer += next.part->answer_bytes;
        question += next.part->bytes;
        const bool full =
            keys > kMaxKeysACall || answer > kMaxAnswerBytes || question > kMaxLookupBytes;
        if (!call->parts.empty() && full) break;
        call->request.add_parts()->Swap(&next.part->part);
        peer->waiting_bytes -= next.part->bytes;
        deadline = std::max(deadline, next.deadline);
        call->parts.push_back(next);
        peer->waiting.pop_front();
      }
      ++peer->calls;
      call->request.set_plan_epoch(peer->epoch);
      call->context.set_deadline(std::chrono::system_clock::now() + (deadline - Clock::now()));
    }
    call->peer = peer;
    ++stats.calls;
    stats.parts += call->parts.size();
    Send(std::move(call));
    now = false;
  }
}

void PeerPool::Impl::Beat(const std::shared_ptr<Peer>& peer, bool again) {
  {
    const std::lock_guard lock(peer->mutex);
    if (peer->beat_under_way) {
      // What it carries may be older than what is to be told now.
      peer->beat_again = peer->beat_again || again;
      return;
    }
    peer->beat_under_way = true;
    peer->beat_again = false;
    peer->beaten = Clock::now();
  }
  auto call = std::make_unique<Call>();
  call->peer = peer;
  call->request.set_plan_epoch(epoch());
  call->context.set_deadline(std::chrono::system_clock::now() + options.beat_every);
  Send(std::move(call));
}

void PeerPool::Impl::Run() {
  while (true) {
    bool all = false;
    {
      std::unique_lock lock(mutex);
      const auto wait = flush ? std::chrono::microseconds(options.coalesce)
                              : std::chrono::microseconds(options.beat_every) / 2;
      wake.wait_for(lock, wait, [this] { return stop || beat_now || flush; });
      if (stop) return;
      if (flush && !beat_now) {
        // Something began to wait: give it its 200 us.
        wake.wait_for(lock, options.coalesce, [this] { return stop || beat_now; });
        if (stop) return;
      }
      all = beat_now;
      beat_now = flush = false;
    }
    for (const auto& peer : All()) {
      SendWaiting(peer, /*now=*/false);
      bool due = all;
      {
        const std::lock_guard lock(peer->mutex);
        due = due || Clock::now() - peer->beaten >= options.beat_every;
      }
      if (due) Beat(peer, all);
    }
  }
}

PeerPool::PeerPool(PeerPoolOptions options, std::function<v1::VersionRange()> versions,
                   std::function<uint64_t()> epoch)
    : impl_(std::make_unique<Impl>()) {
  impl_->options = std::move(options);
  impl_->versions = std::move(versions);
  impl_->epoch = std::move(epoch);
  impl_->thread = std::thread([impl = impl_.get()] { impl->Run(); });
}

PeerPool::~PeerPool() {
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->stop = true;
  }
  impl_->wake.notify_all();
  impl_->thread.join();
  // Every call has a deadline.
  std::unique_lock lock(impl_->mutex);
  impl_->idle.wait(lock, [this] { return impl_->under_way == 0; });
}

void PeerPool::SetPeers(std::span<const Address> peers) {
  const std::lock_guard lock(impl_->mutex);
  std::map<std::string, std::shared_ptr<Peer>> next;
  for (const Address& each : peers) {
    const auto found = impl_->peers.find(each.name);
    if (found != impl_->peers.end() && found->second->address == each.address) {
      next[each.name] = found->second;
      continue;
    }
    auto peer = std::make_shared<Peer>();
    peer->name = each.name;
    peer->address = each.address;
    peer->heard = Clock::now();
    grpc::ChannelArguments arguments;
    arguments.SetMaxReceiveMessageSize(kMaxMessageBytes);
    arguments.SetMaxSendMessageSize(kMaxMessageBytes);
    // A peer that restarts is to be found again at once.
    arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 50);
    // How long a connection may take to be made, at least: a busy peer takes its time.
    arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 2000);
    arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 200);
    peer->stub = v1::NodeService::NewStub(
        grpc::CreateCustomChannel(each.address, grpc::InsecureChannelCredentials(), arguments));
    next[each.name] = std::move(peer);
  }
  impl_->peers = std::move(next);
  impl_->beat_now = true;
  impl_->wake.notify_all();
}

void PeerPool::Heard(const std::string& name, const v1::VersionRange& versions) {
  if (const auto peer = impl_->Find(name)) impl_->Learn(peer.get(), versions, nullptr);
}

void PeerPool::BeatNow() {
  const std::lock_guard lock(impl_->mutex);
  impl_->beat_now = true;
  impl_->wake.notify_all();
}

void PeerPool::Lookup(const std::string& name, std::span<PartCall> parts, uint64_t epoch,
                      std::chrono::steady_clock::time_point deadline, std::function<void()> done) {
  auto batch = std::make_shared<Batch>();
  batch->left = parts.size() + 1;
  batch->done = std::move(done);
  const std::shared_ptr<Peer> peer = impl_->Find(name);
  bool waits = false;
  if (peer != nullptr) {
    const std::lock_guard lock(peer->mutex);
    peer->epoch = std::max(peer->epoch, epoch);
    const auto now = Clock::now();
    for (PartCall& part : parts) {
      if (peer->waiting.size() >= kMaxWaiting) break;
      part.bytes = part.part.ByteSizeLong();
      peer->waiting_bytes += part.bytes;
      peer->waiting.push_back({&part, batch, deadline, now});
      parts = parts.subspan(1);
    }
    waits = peer->calls >= kCallsAtOnce;
  }
  for (PartCall& part : parts) {
    part.status = {Code::kUnavailable,
                   "node " + name + (peer == nullptr ? " is no peer" : " has too much to do")};
    batch->Finish();
  }
  if (peer != nullptr) impl_->SendWaiting(peer, /*now=*/false);
  if (waits) {
    const std::lock_guard lock(impl_->mutex);
    impl_->flush = true;
    impl_->wake.notify_all();
  }
  batch->Finish();
}

bool PeerPool::Lives(const std::string& name, uint64_t version, uint64_t lineage) const {
  const std::shared_ptr<Peer> peer = impl_->Find(name);
  if (peer == nullptr) return false;
  const std::lock_guard lock(peer->mutex);
  return !peer->heard_of || Has(*peer, version, lineage);
}

PeerPool::Common PeerPool::CommonVersions(uint64_t newest, uint64_t floor) const {
  const auto peers = impl_->All();
  Common common{newest, 0};
  // What one of them no longer has cannot be pinned either.
  uint64_t low = floor;
  for (const auto& peer : peers) {
    const std::lock_guard lock(peer->mutex);
    if (!peer->lives) continue;
    common.begin = std::max(common.begin, peer->oldest);
    if (peer->newest >= floor) low = std::max(low, std::min(peer->oldest, newest));
  }
  for (const auto& peer : peers) {
    const std::lock_guard lock(peer->mutex);
    if (peer->lives && peer->newest >= low) common.newest = std::min(common.newest, peer->newest);
  }
  return common;
}

bool PeerPool::HaveReached(uint64_t version) const {
  return std::ranges::all_of(impl_->All(), [&](const std::shared_ptr<Peer>& peer) {
    const std::lock_guard lock(peer->mutex);
    return !peer->lives || peer->newest >= version;
  });
}

uint32_t PeerPool::Alive() const {
  uint32_t alive = 0;
  for (const auto& peer : impl_->All()) {
    const std::lock_guard lock(peer->mutex);
    alive += peer->lives ? 1 : 0;
  }
  return alive;
}

const PeerStats& PeerPool::stats() const { return impl_->stats; }

}  // namespace embertide
