// Observation batches without a copy: blocks of rows in the slab that Python arrays own for a while.
#pragma once

#include <atomic>
#include <bit>
#include <memory>

#include "python.hpp"

namespace muster {

// Counts the forks that this process has begun.
inline std::atomic<uint32_t> g_forks_begun{0};

// Lends blocks of observation rows to Python's arrays. Block 0 is never lent: it holds the rows that are waited for and
// returned one by one.
class Lending {
 public:
  // memory: the Python object that keeps the slab mapped.
  Lending(PyObject* memory, uint32_t num_blocks)
      : memory_(Ref::borrow(memory)), all_(uint32_t((uint64_t{1} << num_blocks) - 2)) {}

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
    auto loan = std::make_unique<Loan>(Loan{Ref::borrow(memory_.get()), lent_, 1u << block, g_forks_begun.load()});
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
    uint32_t forks_begun;
  };

  static void give_back(PyObject* capsule) {
    const std::unique_ptr<Loan> loan(static_cast<Loan*>(PyCapsule_GetPointer(capsule, nullptr)));
    // A child that was forked meanwhile may still read the array, in the same memory: then the block stays lent.
    if (loan->forks_begun == g_forks_begun.load()) loan->lent->fetch_and(~loan->bit, std::memory_order_release);
  }

  Ref memory_;
  uint32_t all_;
  std::shared_ptr<Bits> lent_ = std::make_shared<Bits>(0);
};

}  // namespace muster
