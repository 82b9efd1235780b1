#pragma once

#include <attnpack/ops/cuda/kernels/table.h>

// The launchers in the .cu files. library.cu joins them into the table.
namespace attnpack::cuda {

const char* forward_exact(const AttentionParams&, const ForwardPlan&, void* workspace, int device, void* stream);
const char* forward_prefill(const AttentionParams&, const ForwardPlan&, void* workspace, int device, void* stream);
const char* forward_decode(const AttentionParams&, const ForwardPlan&, void* workspace, int device, void* stream);
const char* forward_latent(const AttentionParams&, const ForwardPlan&, void* workspace, int device, void* stream);
const char* latent_sm90(const AttentionParams&, const ForwardPlan&, void* workspace, int device, void* stream);
const char* forward_sm90(const AttentionParams&, const ForwardPlan&, void* workspace, int device, void* stream);
const char* forward_masked_sm90(const AttentionParams&, const ForwardPlan&, void* workspace, int device, void* stream);
// Make bits and lists of a bool mask (mask_bits.cuh). tile_rows: of each list.
const char* pack_mask(const AttentionParams&, const MaskBits&, void* workspace, int device, void* stream);
const char* list_keys(const AttentionParams&, const MaskBits&, const MaskLists&, int64_t tile_rows, void* workspace,
                      int device, void* stream);
const char* list_rows(const AttentionParams&, const MaskBits&, const MaskLists&, void* workspace, int device,
                      void* stream);
const char* forward_rules_sm90(const AttentionParams&, const ForwardPlan&, void* workspace, int device, void* stream);
const char* forward_from_source(const AttentionParams&, const ForwardPlan&, void* workspace, int device, void* stream);
bool has_sm90_image();  // on the current device
const char* merge_forward(const AttentionParams&, const ForwardPlan&, void* workspace, int device, void* stream);
const char* backward_exact(const AttentionBackwardParams&, int64_t most_group, int device, void* stream);
const char* backward_mma(const AttentionBackwardParams&, const BackwardPlan&, void* workspace, int device,
                         void* stream);
const char* backward_sm90(const AttentionBackwardParams&, const BackwardPlan&, void* workspace, int device,
                          void* stream);
const char* backward_masked_sm90(const AttentionBackwardParams&, const BackwardPlan&, void* workspace, int device,
                                 void* stream);
const char* backward_rules_sm90(const AttentionBackwardParams&, const BackwardPlan&, void* workspace, int device,
                                void* stream);
// Add up the parts of a gradient, if there are several.
const char* sum_query_gradient(const AttentionBackwardParams&, const BackwardPlan&, void* workspace, int device,
                               void* stream);
const char* sum_key_gradient(const AttentionBackwardParams&, const BackwardPlan&, void* workspace, int device,
                             void* stream);
const char* place(const PlaceParams&, int device, void* stream);
const char* quantize(const QuantizeParams&, RowsTo, int64_t rows, int device, void* stream);
const char* rope(const RopeParams&, int device, void* stream);
const char* linear(const LinearParams&, int device, void* stream);

}  // namespace attnpack::cuda
