// FaultyBlockFile: any BlockFile with faults put in between, or something done while it works, for
// tests.
#pragma once

#include <cerrno>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ssd/block_file.h"

namespace embertide {

enum class Fault : uint8_t {
  kIoError,    // the read fails with EIO
  kShortRead,  // the second half of the block does not come: zeros
  kBitFlip,    // one bit of the block is another
};

// The faults that are to happen, shared by a test and its files. Thread-safe.
class Faults {
 public:
  void Put(uint64_t block, Fault fault, uint32_t bit = 0) {
    const std::lock_guard lock(mutex_);
    blocks_[block] = {fault, bit};
  }
  void Clear() {
    const std::lock_guard lock(mutex_);
    blocks_.clear();
    writes_fail_ = false;
    before_read_ = before_write_ = nullptr;
  }
  // Writes get half of their blocks through, then the disk is full.
  void FillDisk() {
    const std::lock_guard lock(mutex_);
    writes_fail_ = true;
  }
  // Called once, by whoever reads or writes next, before it does: what a drive that takes long
  // leaves others the time for.
  void BeforeRead(std::function<void()> call) {
    const std::lock_guard lock(mutex_);
    before_read_ = std::move(call);
  }
  // The blocks of each batch of reads since the last call.
  std::vector<std::vector<uint64_t>> TakeReads() {
    const std::lock_guard lock(mutex_);
    return std::exchange(reads_, {});
  }
  void BeforeWrite(std::function<void()> call) {
    const std::lock_guard lock(mutex_);
    before_write_ = std::move(call);
  }

 private:
  friend class FaultyBlockFile;
  struct Wrong {
    Fault fault;
    uint32_t bit;
  };
  std::optional<Wrong> Find(uint64_t block) const {
    const std::lock_guard lock(mutex_);
    const auto found = blocks_.find(block);
    return found == blocks_.end() ? std::nullopt : std::optional(found->second);
  }
  void Note(std::span<const uint64_t> blocks) {
    const std::lock_guard lock(mutex_);
    reads_.emplace_back(blocks.begin(), blocks.end());
  }
  void CallOnce(std::function<void()> Faults::* which) {
    std::function<void()> call;
    {
      const std::lock_guard lock(mutex_);
      call = std::exchange(this->*which, nullptr);
    }
    if (call) call();
  }
  bool WritesFail() const {
    const std::lock_guard lock(mutex_);
    return writes_fail_;
  }
  mutable std::mutex mutex_;
  std::map<uint64_t, Wrong> blocks_;
  bool writes_fail_ = false;
  std::vector<std::vector<uint64_t>> reads_;
  std::function<void()> before_read_;
  std::function<void()> before_write_;
};

class FaultyBlockFile : public BlockFile {
 public:
  // `faults` outlives it.
  FaultyBlockFile(std::unique_ptr<BlockFile> file, Faults* faults)
      : file_(std::move(file)), faults_(faults) {}

  Status Read(std::span<const uint64_t> blocks, const BlockSink& sink) override {
    faults_->Note(blocks);
    faults_->CallOnce(&Faults::before_read_);
    return file_->Read(blocks, [&](size_t read, const std::byte* block) {
      const auto put = faults_->Find(blocks[read]);
      if (!put.has_value()) return sink(read, block);
      if (put->fault == Fault::kIoError) {
        return Status(Code::kDeviceError,
                      "read of SSD block " + std::to_string(blocks[read]) + ": " + strerror(EIO));
      }
      std::vector<std::byte> bad(block, block + kBlockBytes);
      if (put->fault == Fault::kShortRead) {
        std::fill(bad.begin() + kBlockBytes / 2, bad.end(), std::byte{0});
      } else {
        bad[put->bit / 8] ^= std::byte{1} << (put->bit % 8);
      }
      return sink(read, bad.data());
    });
  }

  Status Write(uint64_t block, std::span<const std::byte> bytes) override {
    faults_->CallOnce(&Faults::before_write_);
    if (!faults_->WritesFail()) return file_->Write(block, bytes);
    const size_t half = bytes.size() / kBlockBytes / 2;
    EMBERTIDE_RETURN_IF_ERROR(file_->Write(block, bytes.first(half * kBlockBytes)));
    return {Code::kDeviceError,
            "write of SSD block " + std::to_string(block + half) + ": " + strerror(ENOSPC)};
  }
  Status Sync() override {
    if (!faults_->WritesFail()) return file_->Sync();
    return {Code::kDeviceError, std::string("sync of the SSD log: ") + strerror(ENOSPC)};
  }
  const char* engine() const override { return file_->engine(); }
  bool direct() const override { return file_->direct(); }

 private:
  const std::unique_ptr<BlockFile> file_;
  Faults* const faults_;
};

}  // namespace embertide
