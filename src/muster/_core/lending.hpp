// Observation batches without a copy: blocks of rows in the slab that Python arrays own for a while.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "python.hpp"
#include "slab.hpp"

namespace muster {

// Whole pages of memory that other processes map, too, but that an array of this process owns. A forked child has a copy
// of them, as of all other memory; nothing moves in the parent, where other threads may be writing.
class OwnPages {
 public:
  OwnPages(void* start, size_t size) : start_(start), size_(size) {
    const std::lock_guard lock(mutex_);
    all_.push_back(this);
  }
  ~OwnPages() {
    const std::lock_guard lock(mutex_);
    std::erase(all_, this);
  }
  OwnPages(const OwnPages&) = delete;
  OwnPages& operator=(const OwnPages&) = delete;

  // Whether a forked child may still read the shared memory: there was none for a copy.
  bool are_shared() const { return are_shared_; }

  static void before_fork() {
    mutex_.lock();
    for (OwnPages* one : all_) {
      one->copy_ = mmap(nullptr, one->size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (one->copy_ != MAP_FAILED)
        std::memcpy(one->copy_, one->start_, one->size_);
      else
        one->are_shared_ = true;
    }
  }
  // Where the fork failed, too.
  static void after_in_parent() {
    for (OwnPages* one : all_)
      if (one->copy_ != MAP_FAILED) munmap(one->copy_, one->size_);
    mutex_.unlock();
  }
  // The copies take the place of the shared memory, into which workers go on writing.
  static void after_in_child() {
    for (OwnPages* one : all_)
      if (one->copy_ != MAP_FAILED &&
          mremap(one->copy_, one->size_, one->size_, MREMAP_MAYMOVE | MREMAP_FIXED, one->start_) == MAP_FAILED)
        std::abort();
    all_.clear();
    mutex_.unlock();
  }

 private:
  inline static std::mutex mutex_;
  inline static std::vector<OwnPages*> all_;
  void* start_;
  size_t size_;
  void* copy_ = MAP_FAILED;  // during a fork
  bool are_shared_ = false;
};

// Lends blocks of observation rows to Python's arrays. Block 0 is never lent: it holds the rows that are waited for and
// returned one by one.
class Lending {
 public:
  // memory: the Python object that keeps the slab mapped.
  Lending(const SlabLayout& slab, PyObject* memory)
      : slab_(slab), memory_(Ref::borrow(memory)), all_(uint32_t((uint64_t{1} << slab.num_obs_blocks) - 2)) {}

  // Returns a block that no array owns, or 0 if there is none. The lowest: it is then often the one used last, which
  // the cores have in their caches.
  uint32_t free_block() const {
    const uint32_t free = all_ & ~lent_->load(std::memory_order_acquire);
    return free ? uint32_t(std::countr_zero(free)) : 0;
  }

  // Returns a writable array over `rows`, which lie in `block`. The block is free again once the last view of the array
  // is gone.
  Ref lend(uint32_t block, char* rows, int type_num, const std::vector<npy_intp>& shape) {
    Ref array =
        checked(PyArray_SimpleNewFromData(int(shape.size()), const_cast<npy_intp*>(shape.data()), type_num, rows));
    auto loan = std::make_unique<Loan>(Ref::borrow(memory_.get()), lent_, 1u << block);
    char* start = slab_.base + slab_.obs_offset + slab_.obs_block_shift(block);
    if (slab_.is_shared) loan->pages.emplace(start, slab_.obs_lent_bytes);
    Ref capsule = checked(PyCapsule_New(loan.get(), nullptr, give_back));
    lent_->fetch_or(loan->bit, std::memory_order_relaxed);
    loan.release();
    check(PyArray_SetBaseObject(reinterpret_cast<PyArrayObject*>(array.get()), capsule.release()));
    return array;
  }

 private:
  using Bits = std::atomic<uint32_t>;

  struct Loan {
    Ref memory;
    std::shared_ptr<Bits> lent;
    uint32_t bit;
    std::optional<OwnPages> pages;  // where other processes map the slab, too
  };

  static void give_back(PyObject* capsule) {
    const std::unique_ptr<Loan> loan(static_cast<Loan*>(PyCapsule_GetPointer(capsule, nullptr)));
    if (loan->pages && loan->pages->are_shared()) return;  // the block stays lent
    loan->pages.reset();
    loan->lent->fetch_and(~loan->bit, std::memory_order_release);
  }

  SlabLayout slab_;
  Ref memory_;
  uint32_t all_;
  std::shared_ptr<Bits> lent_ = std::make_shared<Bits>(0);
};

}  // namespace muster
