#pragma once

// Only names, without any header of torch: for headers that hold or pass attnpack's classes by pointer or reference. A
// member std::shared_ptr<attnpack::MultiHeadAttentionImpl> needs no more. The file that makes or calls the module
// includes the module's own header (modules/attention/grouped_attention.h), which costs less than attnpack.h:
// benchmarks/compile_time.py prints what each costs. MultiHeadAttentionOptions and its two relatives are no classes of
// their own and stand only in their header.

namespace attnpack {

class CausalLM;
class CompressedAttention;
class Decoder;
class DecoderBlock;
class DifferentialAttention;
class Embedding;
class Encoder;
class EncoderBlock;
class EncoderDecoder;
class EntryIndexer;
class EntryScorer;
class ExpertGate;
class FeedForward;
class ForgetGate;
class GatedConvolution;
class GatedDeltaNet;
class GroupedQueryAttention;
class KimiDeltaAttention;
class LayerInputTable;
class LayerNorm;
class LayerTail;
class LightningIndexer;
class Linear;
class LinearAttention;
class Mamba2;
class MixtureOfExperts;
class MultiHeadAttention;
class MultiHeadLatentAttention;
class MultiQueryAttention;
class ProjectedAttention;
class RMSNorm;
class RotaryEmbedding;
class SelfAttention;
class ShortConvolution;
class SparseAttention;
class SparseLatentAttention;
class TokenCompressor;

class CausalLMImpl;
class CompressedAttentionImpl;
class DecoderImpl;
class DecoderBlockImpl;
class DifferentialAttentionImpl;
class EmbeddingImpl;
class EncoderImpl;
class EncoderBlockImpl;
class EncoderDecoderImpl;
class EntryIndexerImpl;
class EntryScorerImpl;
class ExpertGateImpl;
class FeedForwardImpl;
class ForgetGateImpl;
class GatedConvolutionImpl;
class GatedDeltaNetImpl;
class GroupedQueryAttentionImpl;
class KimiDeltaAttentionImpl;
class LayerInputTableImpl;
class LayerNormImpl;
class LayerTailImpl;
class LightningIndexerImpl;
class LinearAttentionImpl;
class LinearImpl;
class Mamba2Impl;
class MixtureOfExpertsImpl;
class MultiHeadAttentionImpl;
class MultiHeadLatentAttentionImpl;
class MultiQueryAttentionImpl;
class ProjectedAttentionImpl;
class RMSNormImpl;
class RotaryEmbeddingImpl;
class SelfAttentionImpl;
class ShortConvolutionImpl;
class SparseAttentionImpl;
class SparseLatentAttentionImpl;
class TokenCompressorImpl;

class AttentionModule;
class RecurrentModule;
class TokenModule;

class CrossCache;
class DynamicCache;
class IndexedCache;
class KVCache;
class LatentCache;
class ModelCache;
class PagedCache;
class QuantizedCache;
class RecurrentCache;
class SlidingWindowCache;
class SparseCache;
class StaticCache;

struct AttentionInputs;
struct AttentionOptions;
struct CausalConv1dOptions;
struct CausalLMInputs;
struct CausalLMOptions;
struct CompressedAttentionOptions;
struct DecoderBlockOptions;
struct DeltaSettings;
struct DeltaWeights;
struct DifferentialAttentionOptions;
struct EmbeddingOptions;
struct EncoderBlockOptions;
struct EncoderDecoderGenerateInputs;
struct EncoderDecoderInputs;
struct EncoderInputs;
struct FeedForwardOptions;
struct ForgetGateOptions;
struct FromHfOptions;
struct GatedConvolutionOptions;
struct GatedDeltaNetOptions;
struct GenerateOptions;
struct GgufOptions;
struct KimiDeltaAttentionOptions;
struct LayerInputTableOptions;
struct LayerNormOptions;
struct LayerSettings;
struct LayerTailOptions;
struct LinearAttendSettings;
struct LinearAttentionOptions;
struct LinearOptions;
struct LoadResult;
struct Mamba2Options;
struct MixtureOfExpertsOptions;
struct MultiHeadLatentAttentionOptions;
struct PagedCacheOptions;
struct ProjectedAttentionOptions;
struct QuantizedCacheOptions;
struct RecurrenceOptions;
struct RecurrentInputs;
struct RMSNormOptions;
struct RecurrentSettings;
struct RecurrentStates;
struct RopeScaling;
struct RotaryEmbeddingOptions;
struct RouteOptions;
struct ScoreSettings;
struct SelfAttentionOptions;
struct ShortConvolutionOptions;
struct SlidingWindowCacheOptions;
struct SparseAttentionOptions;
struct SparseLatentAttentionOptions;
struct StateSpaceSettings;
struct StateSpaceWeights;
struct StaticCacheOptions;
struct TailSettings;
struct VarlenOptions;

namespace distributed {

class ShardedCache;
struct ContextParallelOptions;

}  // namespace distributed

}  // namespace attnpack
