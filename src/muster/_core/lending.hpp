// Observation batches without a copy: blocks of rows in the slab that Python arrays own for a while.
#pragma once

#include <atomic>
#include <bit>
#include <memory>

#include "python.hpp"

namespace muster {

// Counts the forks that this process has begun.
inline std::atomic<uint32_t> g_forks_begun{0};

// Block 0 is never lent: it is where rows lie that are waited for and taken one by one.
class Lending {
 public:
  // memory: the Python object that keeps the slab mapped.
  Lending(PyObject* memory, uint32_t num_blocks)
      : memory_(Ref::borrow(memory)), all_(uint32_t((uint64_t{1} << num_blocks) - 2)) {}

  // A block that no array owns, the same again where it can be, since the cores have it in their caches; else 0.
  uint32_t free_block() const {
    const uint32_t free = all_ & ~lent_->load(std::memory_order_acquire);
    return free ? uint32_t(std::countr_zero(free)) : 0;
  }

  // A writable array at `rows`, which lie in `block`; the block is free again with the last view of the array.
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
    // A child forked meanwhile may still read the array, in the same memory: then the block is not used again.
    if (loan->forks_begun == g_forks_begun.load()) loan->lent->fetch_and(~loan->bit, std::memory_order_release);
  }

  Ref memory_;
  uint32_t all_;
  std::shared_ptr<Bits> lent_ = std::make_shared<Bits>(0);
};

}  // namespace muster
