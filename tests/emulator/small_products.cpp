// Matrix products of one warpgroup, from operands in shared memory that lie either way
// (test_emulated_machine.py).
#include <cutlass/numeric_types.h>
#include <cute/algorithm/gemm.hpp>
#include <cute/tensor.hpp>

#include "common/platform.h"
#include "launch.h"
#include "machine.h"
#include "sm90/hopper.h"
#include "static_switch.h"

namespace flash_cute::emulator {
namespace {

using cute::SM90::GMMA::Major;
using Element = cutlass::half_t;

constexpr int kSizes[] = {64, 128};  // rows of A and B
constexpr int kDepth = 64;
constexpr int kThreads = 128;

// As emulator.py has it. Fields of 4 bytes: the compiler fills no gaps.
struct CProduct {
  const Element* a;  // (rows, kDepth)
  const Element* b;
  float* d;         // (rows, rows)
  int32_t size;     // which of the sizes
  int32_t a_is_mn;  // the operand's rows are contiguous in shared memory, not k
  int32_t b_is_mn;
  int32_t narrow;       // strips of 32 elements, not of 64
  int32_t depth;        // that is multiplied, from the first k on
  int32_t shift;        // of the operands in shared memory, in elements
  int32_t is_fenced;    // for the asynchronous proxy
  int32_t overwritten;  // before the product is done: of A 0, of B 1, else none
  int32_t row, k;       // of what is
};

template <int kRows, Major kMajorA, Major kMajorB, bool kNarrow>
struct Product {
  template <Major kMajor>
  using Atom = std::conditional_t<kNarrow, cute::SM90::GMMA::Layout_SW64_Atom<Element, kMajor>,
                                  cute::SM90::GMMA::Layout_SW128_Atom<Element, kMajor>>;
  using Shape = cute::Shape<cute::Int<kRows>, cute::Int<kDepth>>;
  // A's patterns follow one another along the rows, those of B along k.
  using LayoutA = decltype(cute::tile_to_shape(Atom<kMajorA>{}, Shape{}));
  using LayoutB =
      decltype(cute::tile_to_shape(Atom<kMajorB>{}, Shape{}, cute::Step<cute::_2, cute::_1>{}));
  using Mma =
      decltype(cute::make_tiled_mma(sm90::hopper::MmaSS<Element, kRows, kMajorA, kMajorB>{}));

  struct Shared {
    alignas(1024) Element a[kRows * kDepth + 512];  // with room for the shift
    alignas(1024) Element b[kRows * kDepth + 512];
  };

  static void run(const void* params, void* memory) {
    using namespace cute;
    namespace hopper = sm90::hopper;
    const auto& p = *static_cast<const CProduct*>(params);
    auto& shared = *static_cast<Shared*>(memory);
    auto sA = make_tensor(make_smem_ptr(shared.a + p.shift), LayoutA{});
    auto sB = make_tensor(make_smem_ptr(shared.b + p.shift), LayoutB{});
    const int thread = platform::thread_index();
    for (int i = thread; i < kRows * kDepth; i += kThreads) {
      sA(i / kDepth, i % kDepth) = p.a[i];
      sB(i / kDepth, i % kDepth) = p.b[i];
    }
    if (p.is_fenced) hopper::fence_async_proxy();
    platform::sync_cta();

    Mma mma;
    auto slice = mma.get_slice(thread);
    auto rA = slice.partition_fragment_A(sA);
    auto rB = slice.partition_fragment_B(sB);
    auto rD = partition_fragment_C(mma, cute::Shape<Int<kRows>, Int<kRows>>{});
    mma.accumulate_ = SM90::GMMA::ScaleOut::Zero;
    hopper::wgmma_fence();
    for (int k = 0; k < p.depth / 16; ++k) {
      gemm(mma, rA(_, _, k), rB(_, _, k), rD);
      mma.accumulate_ = SM90::GMMA::ScaleOut::One;
    }
    hopper::wgmma_commit();
    platform::sync_cta();  // the products are issued, and go on
    if (thread == 0 && p.overwritten == 0) sA(p.row, p.k) = Element(0);
    if (thread == 0 && p.overwritten == 1) sB(p.row, p.k) = Element(0);
    hopper::wgmma_wait<0>();

    auto coordinates =
        slice.partition_C(make_identity_tensor(cute::Shape<Int<kRows>, Int<kRows>>{}));
    for (int i = 0; i < size(rD); ++i) {
      p.d[get<0>(coordinates(i)) * kRows + get<1>(coordinates(i))] = rD(i);
    }
  }
};

}  // namespace
}  // namespace flash_cute::emulator

extern "C" __attribute__((visibility("default"))) int emulate_product(
    const flash_cute::emulator::CProduct* product, uint64_t seed,
    flash_cute::emulator::Counters* counters, char* error, size_t error_bytes) {
  using namespace flash_cute;
  using namespace flash_cute::emulator;
  Session session{.seed = seed, .workers = 1};
  const int64_t rows = kSizes[product->size], operand_bytes = rows * kDepth * sizeof(Element);
  session.global.add({"a", GlobalMemory::Use::kInput, product->a, {1, 1, 1}, {}, operand_bytes});
  session.global.add({"b", GlobalMemory::Use::kInput, product->b, {1, 1, 1}, {}, operand_bytes});
  session.global.add({"d", GlobalMemory::Use::kOutput, product->d, {1, 1, 1}, {}, rows * rows * 4});
  auto launch = [&] {
    const int kind =
        product->size + 2 * product->a_is_mn + 4 * product->b_is_mn + 8 * product->narrow;
    index_switch<16>(kind, [&](auto kind) {
      constexpr int kKind = kind;
      using Kernel = Product<kSizes[kKind % 2], kKind / 2 % 2 ? Major::MN : Major::K,
                             kKind / 4 % 2 ? Major::MN : Major::K, kKind / 8 != 0>;
      run_grid(1, kThreads, sizeof(typename Kernel::Shared), &Kernel::run, product,
               sizeof *product);
    });
  };
  return run_session(session, launch, counters, error, error_bytes);
}
