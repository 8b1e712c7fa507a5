// The small kernels of what Hopper adds: barriers in shared memory, boxes, matrices, registers.
#include "small_kernels.h"

namespace flash_cute::emulator {
namespace {

constexpr SmallKernel kKernels[] = {
    {"a barrier in shared memory orders threads",
     [](const Me& me) {
       me.init(kThreads);
       me.put(me.in());
       me.arrive();
       me.wait(0);
       me.out(me.in_next_warp());
     }},
    {"the phase before the first is over",
     [](const Me& me) {
       me.init(1);
       me.wait(1);
       me.out(me.in());
     }},
    {"a wait for the phase before",
     [](const Me& me) {
       me.init(kThreads);
       me.put(me.in());
       me.arrive();
       me.wait(1);
       me.out(me.in_next_warp());
     }},
    {"a barrier in shared memory that nobody initialised",
     [](const Me& me) {
       me.arrive();
       me.out(me.in());
     }},
    {"a barrier in shared memory, used before it is there",
     [](const Me& me) {
       if (me.thread == 0) init_barrier(&me.shared.barrier, kThreads);
       sync_warp();
       me.arrive();
       me.out(me.in());
     }},
    {"an arrival too many",
     [](const Me& me) {
       me.init(1);
       if (me.thread == 0) me.arrive(16);
       if (me.thread == 0) me.arrive();
       me.out(me.in());
     }},
    {"bytes that never come",
     [](const Me& me) {
       me.init(kThreads);
       me.arrive(16);
       me.wait(0);
       me.out(me.in());
     }},
    {"a box that is waited for",
     [](const Me& me) {
       me.init(1);
       me.begin_box();
       me.wait(0);
       me.out(me.get_of_box());
     }},
    {"a box that is not waited for",
     [](const Me& me) {
       me.init(1);
       me.begin_box();
       sync_cta();
       me.out(me.get_of_box());
     }},
    {"a box to where others read",
     [](const Me& me) {
       me.init(1);
       me.put(me.in());
       me.out(me.get(me.thread));
       me.begin_box();
       me.wait(0);
     }},
    {"a box whose barrier the copy engine does not know",
     [](const Me& me) {
       if (me.thread == 0) init_barrier(&me.shared.barrier, 1);
       sync_cta();
       me.begin_box();
       me.wait(0);
       me.out(me.get_of_box());
     }},
    {"a box that is stored",
     [](const Me& me) {
       me.put_in_box();
       me.show();
       me.store_box_of_all();
       me.wait_for_box();
     }},
    {"boxes that reach beyond the output",
     [](const Me& me) {
       me.put_in_box();
       me.show();
       if (me.thread == 0) {
         me.store_box_at(4, me.shared.first);
         me.store_box_at(-4, me.shared.first);
       }
       me.wait_for_box();
     }},
    {"a box stored without a fence",
     [](const Me& me) {
       me.put_in_box();
       sync_cta();
       me.store_box_of_all();
       me.wait_for_box();
     }},
    {"a box stored with a fence behind the barrier",
     [](const Me& me) {
       me.put_in_box();
       sync_cta();
       fence_async_proxy();
       me.store_box_of_all();
       me.wait_for_box();
     }},
    {"a box stored with a fence ahead of the writes",
     [](const Me& me) {
       fence_async_proxy();
       me.put_in_box();
       sync_cta();
       me.store_box_of_all();
       me.wait_for_box();
     }},
    {"a box stored without a barrier",
     [](const Me& me) {
       me.put_in_box();
       fence_async_proxy();
       me.store_box_of_all();
       me.wait_for_box();
     }},
    {"a box stored of what nobody has written",
     [](const Me& me) {
       me.store_box_of_all();
       me.wait_for_box();
     }},
    {"a box stored twice",
     [](const Me& me) {
       me.put_in_box();
       me.show();
       me.store_box_of_all();
       me.store_box_of_all();
       me.wait_for_box();
     }},
    {"a box stored to the input",
     [](const Me& me) {
       me.put_in_box();
       me.show();
       if (me.thread == 0) tma_store(&me.params.map, me.shared.first, {});
     }},
    {"a box stored from an odd place",
     [](const Me& me) {
       if (me.thread == 0) me.store_box_at(0, me.shared.first + 1);
     }},
    {"a box that is stored and not waited for",
     [](const Me& me) {
       me.put_in_box();
       me.show();
       me.store_box_of_all();
     }},
    {"a box that is stored and not committed",
     [](const Me& me) {
       me.put_in_box();
       me.show();
       if (me.thread == 0) tma_store(&me.params.map_out, me.shared.first, {});
       me.wait_for_box();
     }},
    {"a write to where a box is read",
     [](const Me& me) {
       me.put_in_box();
       me.show();
       me.store_box_of_all();
       if (me.thread == 0) me.put_in_box();
     }},
    {"a write to where a box has been read",
     [](const Me& me) {
       me.put_in_box();
       me.show();
       me.store_box_of_all();
       me.wait_for_box();
       sync_cta();
       me.put_in_box();
     }},
    {"a write to where a box has been read, without a barrier",
     [](const Me& me) {
       me.put_in_box();
       me.show();
       me.store_box_of_all();
       sync_cta();
       me.wait_for_box();
       if (me.thread % 2 != 0) me.put_in_box();
     }},
    {"a write once all boxes but the newest have been read",
     [](const Me& me) { me.store_two_boxes_and_write(me.shared.first); }},
    {"a write to where the newest box is read",
     [](const Me& me) { me.store_two_boxes_and_write(me.shared.second); }},
    {"matrices that are stored",
     [](const Me& me) {
       me.put_matrices(&me.shared.first[me.thread]);
       sync_warp();
       me.out(me.get(me.thread));
     }},
    {"registers that nobody gives back",
     [](const Me& me) {
       register_alloc(256);
       me.out(me.in());
     }},
    {"registers that change hands",
     [](const Me& me) {
       me.thread < 32 ? register_dealloc(248) : register_alloc(256);
       me.out(me.in());
     }},
    {"matrices stored to neighbouring rows",
     [](const Me& me) {
       me.put_matrices(&me.shared.first[me.thread]);
       me.out(me.in());
     }},
    {"matrices stored to the same banks",
     [](const Me& me) {
       me.put_matrices(&me.shared.words[me.thread]);
       me.out(me.in());
     }},
};

}  // namespace

std::span<const SmallKernel> small_hopper_kernels() { return kKernels; }

}  // namespace flash_cute::emulator
