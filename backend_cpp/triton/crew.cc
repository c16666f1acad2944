// Handing work to sleeping threads, and waiting for them.
#include "triton/crew.h"

namespace embertide::triton {

Crew::Crew(uint32_t threads) {
  for (uint32_t part = 1; part < threads; ++part) {
    Worker* worker = workers_.emplace_back(std::make_unique<Worker>()).get();
    worker->thread = std::thread([this, worker, part] { Serve(worker, part); });
  }
}

Crew::~Crew() {
  work_ = nullptr;
  for (const auto& worker : workers_) {
    ++worker->round;
    worker->round.notify_one();
    worker->thread.join();
  }
}

void Crew::Serve(Worker* worker, uint32_t part) {
  for (uint32_t seen = 0;;) {
    worker->round.wait(seen);
    seen = worker->round.load();
    if (work_ == nullptr) return;
    (*work_)(part);
    if (--at_work_ == 0) at_work_.notify_one();
  }
}

void Crew::Run(uint32_t parts, const std::function<void(uint32_t)>& work) {
  work_ = &work;
  at_work_ = parts - 1;
  for (uint32_t part = 1; part < parts; ++part) {
    Worker& worker = *workers_[part - 1];
    ++worker.round;
    worker.round.notify_one();
  }
  work(0);
  for (uint32_t left = at_work_; left != 0; left = at_work_) at_work_.wait(left);
}

}  // namespace embertide::triton
