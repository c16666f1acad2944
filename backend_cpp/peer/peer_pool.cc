// Connections, beats and calls that carry parts of several requests.
#include "peer/peer_pool.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <new>
#include <set>
#include <thread>

#include "base/background_task.h"
#include "embertide/v1/node.grpc.pb.h"
#include "peer/limits.h"

namespace embertide {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint32_t kCallsAtOnce = 2;  // more wait, and are put together
// Parts that wait for one peer; further ones fail: it is slower than what is asked of it.
constexpr size_t kMaxWaiting = 4096;
// Parts share a call while their deadlines lie so close together: the latest is the call's.
constexpr std::chrono::milliseconds kDeadlinesApart{20};
// Between two beats that calls of others bring about: so much longer may one node pin an older
// version than another after a commit.
constexpr std::chrono::milliseconds kBeatsApart{1};
// How long a dead peer's connection is tried before a new one is made. gRPC itself resolves a name
// at most every 30 s, and never gives up a connection whose other end went without a word. A node
// that comes back elsewhere is to be found within two seconds.
constexpr std::chrono::milliseconds kRedialEvery{1000};
// After a round that threw: without beats a peer takes this node for dead.
constexpr std::chrono::milliseconds kLongestBackOff{400};

// One Lookup of the caller's: `done` when its last part is.
struct Batch {
  std::atomic<size_t> left{0};
  std::function<void()> done;
  void Finish() noexcept {
    if (--left == 0) done();
  }
};

struct Waiting {
  PartCall* part;
  std::shared_ptr<Batch> batch;
  Clock::time_point deadline;
  Clock::time_point since;

  size_t cost() const { return part->bytes + part->answer_bytes; }
};

void Fail(PartCall* part, NoAnswer why, std::string message) {
  part->status = {Code::kUnavailable, std::move(message)};
  part->why = why;
}

NoAnswer WhyOf(grpc::StatusCode code) {
  switch (code) {
    case grpc::StatusCode::DEADLINE_EXCEEDED:
      return NoAnswer::kDeadline;
    case grpc::StatusCode::RESOURCE_EXHAUSTED:
      return NoAnswer::kOverload;
    case grpc::StatusCode::UNAVAILABLE:
    case grpc::StatusCode::CANCELLED:
      return NoAnswer::kDead;
    default:
      return NoAnswer::kRefused;
  }
}

std::shared_ptr<v1::NodeService::Stub> Dial(const std::string& address,
                                            const Credentials& credentials) {
  grpc::ChannelArguments arguments;
  // A proxy that the environment names would read tokens and rows.
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetMaxReceiveMessageSize(kMaxMessageBytes);
  arguments.SetMaxSendMessageSize(kMaxMessageBytes);
  // A peer that restarts is to be found again at once.
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 50);
  // How long a connection may take to be made, at least: a busy peer takes its time.
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 2000);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 200);
  // Else a new channel to the same address is the old connection.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return v1::NodeService::NewStub(
      grpc::CreateCustomChannel(address, credentials.channel(), arguments));
}

struct Peer {
  std::string name;
  std::string address;
  std::atomic<bool> spare = false;

  mutable std::mutex mutex;
  std::shared_ptr<v1::NodeService::Stub> stub;
  Clock::time_point dialled;
  std::deque<Waiting> waiting;
  size_t waiting_bytes = 0;  // of their questions
  size_t cost = 0;           // of what waits and what is under way
  uint64_t epoch = 0;        // of the newest caller
  uint32_t calls = 0;
  bool beat_under_way = false;
  bool beat_again = false;   // as soon as that one is over
  bool beat_wanted = false;  // by a claim
  // The peer as known. One that was never heard of is asked, for as long as beats may be missed.
  bool heard_of = false;
  bool lives = false;
  PeerPool::Range range;
  Clock::time_point range_at;  // when it was learned
  Clock::time_point heard;
  Clock::time_point beaten;
  PeerTraffic traffic;
};

struct Call {
  std::shared_ptr<v1::NodeService::Stub> stub;  // outlives the context, which has its channel
  grpc::ClientContext context;
  v1::LookupRequest request;
  v1::LookupResponse response;
  std::vector<Waiting> parts;
  std::shared_ptr<Peer> peer;
  Clock::time_point begun = Clock::now();
};

}  // namespace

struct PeerPool::Impl {
  PeerPoolOptions options;
  std::function<v1::VersionRange()> versions;
  std::function<uint64_t()> epoch;
  PeerStats stats;

  mutable std::mutex mutex;
  std::condition_variable wake;
  TaskReport* report = nullptr;
  bool stop = false;
  bool beat_now = false;
  bool flush = false;     // something waits for its 200 us
  bool claimed = false;   // a peer's beat_wanted was set
  std::mutex news_mutex;  // taken last; held while `news` is called
  std::function<void()> news;
  std::map<std::string, std::shared_ptr<Peer>> peers;
  std::set<std::shared_ptr<Call>> under_way;
  // Every stub that anything has, so that none ends with the call that had it last: that is on the
  // thread of gRPC for which the end of a channel waits.
  std::vector<std::shared_ptr<v1::NodeService::Stub>> stubs;
  std::condition_variable idle;
  std::chrono::microseconds next_wait{0};
  std::unique_ptr<BackgroundTask> task;  // last: its thread uses the members above

  std::vector<std::shared_ptr<Peer>> All() const {
    const std::lock_guard lock(mutex);
    std::vector<std::shared_ptr<Peer>> all;
    all.reserve(peers.size());
    for (const auto& [name, peer] : peers) all.push_back(peer);
    return all;
  }
  // Spare peers stand in for those that do not answer; they are waited for only then.
  std::vector<std::shared_ptr<Peer>> WaitedFor() const {
    std::vector<std::shared_ptr<Peer>> peers = All();
    const auto is_spare = [](const std::shared_ptr<Peer>& peer) { return peer->spare.load(); };
    if (std::ranges::none_of(peers, is_spare)) return peers;
    const bool all_answer = std::ranges::all_of(peers, [](const std::shared_ptr<Peer>& peer) {
      const std::lock_guard lock(peer->mutex);
      return peer->spare || peer->lives;
    });
    if (all_answer) std::erase_if(peers, is_spare);
    return peers;
  }
  std::shared_ptr<Peer> Find(const std::string& name) const {
    const std::lock_guard lock(mutex);
    const auto found = peers.find(name);
    return found == peers.end() ? nullptr : found->second;
  }

  // A peer that said nothing for so long is dead.
  std::chrono::milliseconds dead_after() const {
    return options.beat_every * options.dead_after_beats;
  }
  Status Round();
  std::shared_ptr<v1::NodeService::Stub> NewStub(const std::string& address);  // needs `mutex`
  // Ends those that nothing else has, and returns how many are left.
  size_t EndStubs();
  // `again`: if a beat is under way, another one follows it.
  void Beat(const std::shared_ptr<Peer>& peer, bool again);
  std::shared_ptr<Call> NewBeat(const std::shared_ptr<Peer>& peer) const;
  void SendWaiting(const std::shared_ptr<Peer>& peer, bool now);
  void Send(const std::shared_ptr<Call>& call);
  // Sends on what waits, once the parts of the call are told.
  void Answered(const std::shared_ptr<Call>& call, const grpc::Status& status) noexcept;
  void Settle(Call* call, const grpc::Status& status);
  void GiveUp(const std::shared_ptr<Call>& call, const char* why) noexcept;
  static void Count(const Call& call, bool ok);
  void Learn(const Call& answered);
  void Missed(Peer* peer);
  void Redial(Peer* peer);
};

void PeerPool::Impl::Learn(const Call& answered) {
  Peer* const peer = answered.peer.get();
  const v1::VersionRange& range = answered.response.versions();
  bool newer = false;
  {
    const std::lock_guard lock(peer->mutex);
    peer->heard = Clock::now();
    peer->heard_of = true;
    newer = range.newest().number() > peer->range.newest;
    // Answers overtake each other: only a call that began later can say less than is known.
    if (range.newest().number() >= peer->range.newest || answered.begun >= peer->range_at) {
      peer->range = {range.oldest().number(), range.newest().number(), range.newest().lineage()};
      peer->range_at = peer->heard;
    }
    peer->lives = peer->range.newest > 0;
  }
  if (!newer) return;
  const std::lock_guard telling(news_mutex);
  if (news != nullptr) news();
}

// It may have been busy; it is dead once it said nothing for as long as its beats last.
void PeerPool::Impl::Missed(Peer* peer) {
  ++stats.failed;
  const std::lock_guard lock(peer->mutex);
  if (!peer->lives && peer->heard_of) return;
  if (Clock::now() - peer->heard < dead_after()) return;
  peer->lives = false;
  peer->heard_of = true;
  ++stats.deaths;
}

// Calls under way on the old connection go on there.
void PeerPool::Impl::Redial(Peer* peer) {
  const std::scoped_lock lock(mutex, peer->mutex);
  const auto now = Clock::now();
  if (peer->lives || !peer->heard_of || now - peer->heard < dead_after()) return;
  if (now - peer->dialled < kRedialEvery) return;
  peer->stub = NewStub(peer->address);
  peer->dialled = now;
  peer->beat_under_way = false;  // one that is stuck there holds up none here
  ++stats.redials;
}

void PeerPool::Impl::Send(const std::shared_ptr<Call>& call) try {
  {
    const std::lock_guard lock(mutex);
    under_way.insert(call);
    if (stop) call->context.TryCancel();
  }
  const std::string token = options.tokens == nullptr ? "" : options.tokens->Sent();
  if (!token.empty()) call->context.AddMetadata("authorization", token);
  call->request.set_asker(options.name);
  *call->request.mutable_asker_versions() = versions();
  {
    const std::lock_guard lock(call->peer->mutex);
    call->stub = call->peer->stub;
  }
  call->stub->async()->Lookup(&call->context, &call->request, &call->response,
                              [this, call](const grpc::Status& status) {
                                Answered(call, status);
                                const std::lock_guard lock(mutex);
                                under_way.erase(call);
                                if (under_way.empty()) idle.notify_all();
                              });
} catch (const std::exception& error) {
  GiveUp(call, error.what());
}

// Whoever waits for its parts is told that they have failed; what else waits is sent by the beats.
void PeerPool::Impl::GiveUp(const std::shared_ptr<Call>& call, const char* why) noexcept {
  report->Failed(why);
  {
    const std::lock_guard lock(call->peer->mutex);
    if (call->parts.empty()) {
      call->peer->beat_under_way = false;
    } else {
      --call->peer->calls;
    }
    for (const Waiting& each : call->parts) call->peer->cost -= each.cost();
  }
  for (const Waiting& each : call->parts) {
    each.part->status = {Code::kUnavailable, {}};
    each.part->why = NoAnswer::kOverload;
    each.batch->Finish();
  }
  const std::lock_guard lock(mutex);
  under_way.erase(call);
  if (under_way.empty()) idle.notify_all();
}

// Requires: its results are still there.
void PeerPool::Impl::Count(const Call& call, bool ok) {
  if (call.parts.empty()) return;
  const std::lock_guard lock(call.peer->mutex);
  PeerTraffic& traffic = call.peer->traffic;
  if (!ok) {
    ++traffic.failed;
    return;
  }
  ++traffic.calls;
  traffic.round_trip +=
      std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - call.begun);
  const int parts = std::min(call.request.parts_size(), call.response.results_size());
  for (int p = 0; p < parts; ++p) {
    const v1::LookupPart& part = call.request.parts(p);
    const auto keys = static_cast<uint64_t>(part.keys_size());
    PeerTraffic::Table& table = traffic.tables[part.table_id()];
    table.keys += keys;
    if (part.pooling() != v1::PART_POOLING_ROWS) {
      table.sum_keys += keys;
      table.sums += static_cast<uint64_t>(std::max(0, part.bag_offsets_size() - 1));
    }
    if (part.has_since()) table.since_keys += keys;
    table.bytes += part.ByteSizeLong() + call.response.results(p).ByteSizeLong();
  }
}

void PeerPool::Impl::Answered(const std::shared_ptr<Call>& call,
                              const grpc::Status& status) noexcept {
  // On a thread of gRPC's, that nothing may leave; the parts have failed until they are told.
  for (const Waiting& each : call->parts) {
    each.part->status = {Code::kUnavailable, {}};
    each.part->why = NoAnswer::kOverload;
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
    for (const Waiting& each : call->parts) call->peer->cost -= each.cost();
  }
  const auto guarded = [this](const auto& work) {
    try {
      work();
    } catch (const std::exception& error) {
      report->Failed(error.what());
    } catch (...) {
      report->Failed("an exception that says nothing");
    }
  };
  guarded([&] { Settle(call.get(), status); });
  guarded([&] {
    if (!beat) SendWaiting(call->peer, /*now=*/true);
    if (again) Beat(call->peer, /*again=*/false);
  });
  for (const Waiting& each : call->parts) each.batch->Finish();
}

void PeerPool::Impl::Settle(Call* call, const grpc::Status& status) {
  Count(*call, status.ok());
  if (status.ok()) {
    Learn(*call);
  } else {
    Missed(call->peer.get());
  }
  const bool whole =
      status.ok() && call->response.results_size() == static_cast<int>(call->parts.size());
  for (size_t i = 0; i < call->parts.size(); ++i) {
    PartCall* part = call->parts[i].part;
    part->epoch = call->response.plan_epoch();
    if (whole) {
      part->result.Swap(call->response.mutable_results(static_cast<int>(i)));
      part->status = Status::Ok();
    } else if (status.ok()) {
      Fail(part, NoAnswer::kRefused, "node " + call->peer->name + " answered other parts");
    } else {
      Fail(part, WhyOf(status.error_code()),
           "node " + call->peer->name + ": " + status.error_message());
      if (status.error_code() == grpc::StatusCode::INVALID_ARGUMENT) {
        part->status = {Code::kInvalidArgument, part->status.message()};
      }
    }
  }
}

// Sends what waits for a peer, as much as a call may carry: at once while few calls are under way.
void PeerPool::Impl::SendWaiting(const std::shared_ptr<Peer>& peer, bool now) {
  while (true) {
    std::shared_ptr<Call> call;
    {
      const std::lock_guard lock(peer->mutex);
      if (peer->waiting.empty()) return;
      const bool due = now || peer->waiting_bytes >= kCoalesceBytes ||
                       Clock::now() - peer->waiting.front().since >= options.coalesce;
      if (peer->calls >= kCallsAtOnce && !due) return;
      call = std::make_shared<Call>();
      call->peer = peer;
      // An exception here leaves every part where it waits.
      const size_t most = std::min<size_t>(peer->waiting.size(), kMaxPartsACall);
      call->parts.reserve(most);
      call->request.mutable_parts()->Reserve(static_cast<int>(most));
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
        const bool apart = next.deadline > deadline + kDeadlinesApart ||
                           next.deadline + kDeadlinesApart < deadline;
        if (!call->parts.empty() && (full || apart)) break;
        v1::LookupPart* place = nullptr;
        try {
          place = call->request.add_parts();
        } catch (const std::bad_alloc&) {
          if (call->parts.empty()) throw;
          break;
        }
        place->Swap(&next.part->part);
        peer->waiting_bytes -= next.part->bytes;
        deadline = std::max(deadline, next.deadline);
        call->parts.push_back(next);
        peer->waiting.pop_front();
      }
      ++peer->calls;
      call->request.set_plan_epoch(peer->epoch);
      call->context.set_deadline(std::chrono::system_clock::now() + (deadline - Clock::now()));
    }
    ++stats.calls;
    stats.parts += call->parts.size();
    Send(call);
    now = false;
  }
}

std::shared_ptr<Call> PeerPool::Impl::NewBeat(const std::shared_ptr<Peer>& peer) const {
  auto call = std::make_shared<Call>();
  call->peer = peer;
  call->request.set_plan_epoch(epoch());
  // One that comes late is a sign of life all the same.
  call->context.set_deadline(std::chrono::system_clock::now() + dead_after());
  return call;
}

void PeerPool::Impl::Beat(const std::shared_ptr<Peer>& peer, bool again) {
  // Made first: if there is no memory for it, none is under way.
  const std::shared_ptr<Call> call = NewBeat(peer);
  {
    const std::lock_guard lock(peer->mutex);
    if (peer->beat_under_way) {
      // The beat under way may carry older news than what is to be told now.
      peer->beat_again = peer->beat_again || again;
      return;
    }
    peer->beat_under_way = true;
    peer->beat_again = false;
    peer->beat_wanted = false;
    peer->beaten = Clock::now();
  }
  Send(call);
}

std::shared_ptr<v1::NodeService::Stub> PeerPool::Impl::NewStub(const std::string& address) {
  return stubs.emplace_back(Dial(address, options.credentials));
}

size_t PeerPool::Impl::EndStubs() {
  std::vector<std::shared_ptr<v1::NodeService::Stub>> ended;  // without the lock
  const std::lock_guard lock(mutex);
  const auto rest = std::partition(stubs.begin(), stubs.end(),
                                   [](const auto& stub) { return stub.use_count() > 1; });
  ended.assign(std::move_iterator(rest), std::move_iterator(stubs.end()));
  stubs.erase(rest, stubs.end());
  return stubs.size();
}

Status PeerPool::Impl::Round() {
  bool all = false;
  {
    std::unique_lock lock(mutex);
    wake.wait_for(lock, flush ? options.coalesce : next_wait,
                  [this] { return stop || beat_now || flush || claimed; });
    if (stop) return Status::Ok();
    if (flush && !beat_now) {
      // Something began to wait: give it its 200 us.
      wake.wait_for(lock, options.coalesce, [this] { return stop || beat_now; });
      if (stop) return Status::Ok();
    }
    all = beat_now;
    beat_now = flush = claimed = false;
  }
  next_wait = std::chrono::microseconds(options.beat_every) / 2;
  EndStubs();
  for (const auto& peer : All()) {
    Redial(peer.get());
    SendWaiting(peer, /*now=*/false);
    bool due = all;
    {
      const std::lock_guard lock(peer->mutex);
      const auto since = Clock::now() - peer->beaten;
      due = due || since >= options.beat_every || (peer->beat_wanted && since >= kBeatsApart);
    }
    if (due) Beat(peer, all);
    // Still wanted: the last one is too recent, or one is under way that began before the claim.
    const std::lock_guard lock(peer->mutex);
    if (peer->beat_wanted) next_wait = std::min<std::chrono::microseconds>(next_wait, kBeatsApart);
  }
  return Status::Ok();
}

PeerPool::PeerPool(PeerPoolOptions options, std::function<v1::VersionRange()> versions,
                   std::function<uint64_t()> epoch)
    : impl_(std::make_unique<Impl>()) {
  impl_->options = std::move(options);
  impl_->versions = std::move(versions);
  impl_->epoch = std::move(epoch);
  impl_->next_wait = impl_->options.beat_every;
  TaskBoard* const board = impl_->options.tasks;
  // The report of failures on gRPC's threads; that a beat goes out heals it.
  impl_->report = (board == nullptr ? TaskBoard::OfProcess() : *board).Of("peers");
  impl_->task = std::make_unique<BackgroundTask>(
      TaskOptions{.name = "peers", .board = board, .longest_back_off = kLongestBackOff},
      [impl = impl_.get()](const std::stop_token&) { return impl->Round(); });
}

PeerPool::~PeerPool() {
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->stop = true;
  }
  impl_->wake.notify_all();
  impl_->task.reset();
  std::unique_lock lock(impl_->mutex);
  auto calls = impl_->under_way;
  lock.unlock();
  for (const auto& call : calls) call->context.TryCancel();
  calls.clear();
  lock.lock();
  impl_->idle.wait(lock, [this] { return impl_->under_way.empty(); });
  impl_->peers.clear();
  lock.unlock();
  // A call that has just ended may still be on its way out of its thread.
  while (impl_->EndStubs() > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

void PeerPool::SetPeers(std::span<const Address> peers) {
  const std::lock_guard lock(impl_->mutex);
  std::map<std::string, std::shared_ptr<Peer>> next;
  for (const Address& each : peers) {
    const auto found = impl_->peers.find(each.name);
    if (found != impl_->peers.end() && found->second->address == each.address) {
      found->second->spare = each.spare;
      next[each.name] = found->second;
      continue;
    }
    auto peer = std::make_shared<Peer>();
    peer->name = each.name;
    peer->address = each.address;
    peer->spare = each.spare;
    peer->heard = Clock::now();
    peer->stub = impl_->NewStub(each.address);
    peer->dialled = peer->heard;
    next[each.name] = std::move(peer);
  }
  impl_->peers = std::move(next);
  impl_->beat_now = true;
  impl_->wake.notify_all();
}

void PeerPool::TellNews(std::function<void()> news) {
  const std::lock_guard lock(impl_->news_mutex);
  impl_->news = std::move(news);
}

void PeerPool::OnVersionHint(const std::string& name, const v1::VersionRange& versions) {
  const std::shared_ptr<Peer> peer = impl_->Find(name);
  if (peer == nullptr) return;
  {
    const std::lock_guard lock(peer->mutex);
    const v1::Version& newest = versions.newest();
    const bool known = peer->lives && newest.number() == peer->range.newest &&
                       newest.lineage() == peer->range.lineage;
    if (known || peer->beat_wanted) return;
    peer->beat_wanted = true;
  }
  const std::lock_guard lock(impl_->mutex);
  impl_->claimed = true;
  impl_->wake.notify_all();
}

void PeerPool::BeatNow() {
  const std::lock_guard lock(impl_->mutex);
  impl_->beat_now = true;
  impl_->wake.notify_all();
}

void PeerPool::LookupAll(std::span<const Ask> asks, uint64_t epoch,
                         std::chrono::steady_clock::time_point deadline,
                         std::chrono::microseconds spin) noexcept {
  const auto fail = [](std::span<PartCall> parts) {
    for (PartCall& part : parts) {
      part.status = {Code::kUnavailable, {}};
      part.why = NoAnswer::kOverload;
    }
  };
  // Shared: who is last may still be waking this thread when it goes on.
  std::shared_ptr<std::atomic<uint32_t>> left;
  try {
    left = std::make_shared<std::atomic<uint32_t>>(static_cast<uint32_t>(asks.size()));
  } catch (const std::bad_alloc&) {
    for (const Ask& ask : asks) fail(ask.parts);
    return;
  }
  for (const Ask& ask : asks) {
    try {
      Lookup(ask.peer, ask.parts, epoch, deadline, [left] {
        if (--*left == 0) left->notify_one();
      });
    } catch (const std::exception& error) {
      impl_->report->Failed(error.what());
      fail(ask.parts);
      --*left;
    }
  }
  const auto until = Clock::now() + spin;
  while (*left != 0 && Clock::now() < until) std::this_thread::yield();
  for (uint32_t now = *left; now != 0; now = *left) left->wait(now);
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
      part.bytes = part.part.ByteSizeLong();
      const size_t cost = part.bytes + part.answer_bytes;
      const bool full = peer->cost > 0 && peer->cost + cost > impl_->options.max_bytes_a_peer;
      if (full || peer->waiting.size() >= kMaxWaiting) break;
      try {
        peer->waiting.push_back({&part, batch, deadline, now});
      } catch (const std::bad_alloc&) {
        break;
      }
      peer->cost += cost;
      peer->waiting_bytes += part.bytes;
      parts = parts.subspan(1);
    }
    waits = peer->calls >= kCallsAtOnce;
  }
  // From here on nothing is thrown: what was put to the peer points to the parts.
  try {
    for (PartCall& part : parts) {
      part.why = peer == nullptr ? NoAnswer::kDead : NoAnswer::kOverload;
      part.status = {Code::kUnavailable, {}};
    }
    for (PartCall& part : parts) {
      const char* what = peer == nullptr ? " is no peer" : " has too much to do";
      Fail(&part, part.why, "node " + name + what);
    }
  } catch (const std::bad_alloc&) {
    waits = true;  // they have failed without a text
  }
  for (size_t i = 0; i < parts.size(); ++i) batch->Finish();
  try {
    if (peer != nullptr) impl_->SendWaiting(peer, /*now=*/false);
  } catch (const std::exception& error) {
    impl_->report->Failed(error.what());
    waits = true;  // the beats send them
  }
  if (waits) {
    const std::lock_guard lock(impl_->mutex);
    impl_->flush = true;
    impl_->wake.notify_all();
  }
  batch->Finish();
}

std::optional<NoAnswer> PeerPool::WhyNot(const std::string& name, uint64_t version,
                                         uint64_t lineage) const {
  const std::shared_ptr<Peer> peer = impl_->Find(name);
  if (peer == nullptr) return NoAnswer::kDead;
  const std::lock_guard lock(peer->mutex);
  if (!peer->heard_of) return std::nullopt;
  if (!peer->lives) return NoAnswer::kDead;
  return peer->range.Has(version, lineage) ? std::nullopt : std::optional(NoAnswer::kVersion);
}

bool PeerPool::IsJustBehind(const std::string& name, uint64_t version) const {
  const std::shared_ptr<Peer> peer = impl_->Find(name);
  if (peer == nullptr) return false;
  const std::lock_guard lock(peer->mutex);
  return peer->lives && peer->range.newest + 1 == version;
}

std::string PeerPool::Describe(const std::string& name) const {
  const std::shared_ptr<Peer> peer = impl_->Find(name);
  if (peer == nullptr) return name + " is no peer";
  const std::lock_guard lock(peer->mutex);
  if (!peer->lives) return name + " does not answer";
  return name + " holds versions " + std::to_string(peer->range.oldest) + " to " +
         std::to_string(peer->range.newest);
}

std::vector<PeerPool::Range> PeerPool::LiveRanges() const {
  std::vector<Range> ranges;
  for (const auto& peer : impl_->WaitedFor()) {
    const std::lock_guard lock(peer->mutex);
    if (peer->lives) ranges.push_back(peer->range);
  }
  return ranges;
}

bool PeerPool::HaveReached(uint64_t version) const {
  return std::ranges::all_of(impl_->WaitedFor(), [&](const std::shared_ptr<Peer>& peer) {
    const std::lock_guard lock(peer->mutex);
    return peer->lives ? peer->range.newest >= version : peer->heard_of;
  });
}

uint32_t PeerPool::Alive() const {
  uint32_t alive = 0;
  for (const auto& peer : impl_->All()) {
    const std::lock_guard lock(peer->mutex);
    alive += peer->lives && !peer->spare ? 1 : 0;
  }
  return alive;
}

const PeerStats& PeerPool::stats() const { return impl_->stats; }

std::map<std::string, PeerTraffic> PeerPool::Traffic() const {
  std::map<std::string, PeerTraffic> traffic;
  for (const auto& peer : impl_->All()) {
    const std::lock_guard lock(peer->mutex);
    traffic[peer->name] = peer->traffic;
  }
  return traffic;
}

}  // namespace embertide
