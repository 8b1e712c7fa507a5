// The ops: their schemas, and what implements them beside flash_cute/cpu.py.
#include <torch/csrc/stable/library.h>

#include "host/build_info.h"
#include "torch/ops.h"

// What both ops take beside q, k and v.
#define OPTIONAL_TENSORS                                                                \
  "Tensor? learnable_sink=None, Tensor? alibi_slopes=None, Tensor? bias=None, Tensor? " \
  "cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? seqused_q=None, Tensor? "      \
  "seqused_k=None, Tensor? key_start=None"
#define KEYWORDS                                                                       \
  "float? softmax_scale=None, SymInt window_left=-1, SymInt window_right=-1, SymInt? " \
  "diagonal_offset=None, float softcap=0.0"

STABLE_TORCH_LIBRARY(flash_cute, m) {
  // Dense q (B, H, N, D), or packed (T, H, D) with cu_seqlens. interface.py explains the arguments.
  m.def("fwd(Tensor q, Tensor k, Tensor v, " OPTIONAL_TENSORS ", *, " KEYWORDS
        ", bool? deterministic=None, str? tuning=None) -> (Tensor out, Tensor softmax_lse)");
  // fwd's gradients. A dout or dlse that is None counts as zeros. dsink and dbias have no elements
  // where there is no sink, and where `bias_grad` does not ask for the bias's.
  m.def(
      "bwd(Tensor? dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor? "
      "dlse=None, " OPTIONAL_TENSORS ", *, " KEYWORDS
      ", bool deterministic=False, bool bias_grad=False, str? tuning=None) -> (Tensor dq, Tensor "
      "dk, Tensor dv, Tensor dsink, Tensor dbias)");
  m.def("build_info() -> str");
  m.def("tiles_for(int smem_per_cta) -> str");
  m.def("plan(str request, str tuning=\"\") -> str");
  m.def("override_aten(str name, str key) -> ()");
  m.def("restore_aten() -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(flash_cute, CUDA, m) {
  m.impl("fwd", TORCH_BOX(&flash_cute::fwd<false>));
  m.impl("bwd", TORCH_BOX(&flash_cute::bwd<false>));
}

STABLE_TORCH_LIBRARY_IMPL(flash_cute, CompositeExplicitAutograd, m) {
  m.impl("build_info", TORCH_BOX(&flash_cute::build_info));
  m.impl("tiles_for", TORCH_BOX(&flash_cute::tiles_for));
  m.impl("plan", TORCH_BOX(&flash_cute::plan));
  m.impl("override_aten", TORCH_BOX(&flash_cute::override_aten));
  m.impl("restore_aten", TORCH_BOX(&flash_cute::restore_aten));
}
