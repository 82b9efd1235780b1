// Attention without torch: a prompt, then token after token over a cache of keys and values that this program holds.
// Every result is compared with plain loops in double.
#include <attnpack/kernels.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { kHeads = 8, kKvHeads = 2, kDim = 64, kCapacity = 40, kPrompt = 33 };

// [heads, kCapacity, kDim]: row t of a head is token t.
static float queries[kHeads][kCapacity][kDim];
static float keys[kKvHeads][kCapacity][kDim], values[kKvHeads][kCapacity][kDim];
static float outputs[kHeads][kCapacity][kDim];

static void fill(float* numbers, size_t count) {
  for (size_t i = 0; i < count; ++i) numbers[i] = (float)rand() / (float)RAND_MAX * 2 - 1;
}

// softmax(q k^T / sqrt(kDim)) v of one head, for token t over the tokens up to t.
static void attend_plainly(int head, int t, double* out) {
  const int kv_head = head / (kHeads / kKvHeads);
  double weights[kCapacity], sum = 0;
  for (int j = 0; j <= t; ++j) {
    double product = 0;
    for (int d = 0; d < kDim; ++d) product += (double)queries[head][t][d] * keys[kv_head][j][d];
    sum += weights[j] = exp(product / sqrt((double)kDim));
  }
  for (int d = 0; d < kDim; ++d) {
    out[d] = 0;
    for (int j = 0; j <= t; ++j) out[d] += weights[j] / sum * values[kv_head][j][d];
  }
}

// The largest difference of the tokens from begin to end.
static double difference(int begin, int end) {
  double most = 0, expected[kDim];
  for (int head = 0; head < kHeads; ++head)
    for (int t = begin; t < end; ++t) {
      attend_plainly(head, t, expected);
      for (int d = 0; d < kDim; ++d) most = fmax(most, fabs(outputs[head][t][d] - expected[d]));
    }
  return most;
}

// A program's own threads: this one calls the work on the thread that there is.
static void run_here(void* calls, int64_t count, void (*work)(void*), void* context) {
  (void)count;
  ++*(int*)calls;
  work(context);
}

int main(void) {
  fill(&queries[0][0][0], sizeof(queries) / sizeof(float));
  fill(&keys[0][0][0], sizeof(keys) / sizeof(float));
  fill(&values[0][0][0], sizeof(values) / sizeof(float));
  printf("attnpack %s, %s\n", attnpack_kernels_version(), attnpack_kernels_instruction_set());

  attnpack_attention_args args = attnpack_attention_defaults();
  const attnpack_strides rows = {0, kCapacity * kDim, kDim};  // one sequence, heads apart by the cache's capacity
  int64_t length = kPrompt;
  args.batch = 1;
  args.num_heads = kHeads;
  args.num_kv_heads = kKvHeads;
  args.head_dim = args.v_head_dim = kDim;
  args.query_strides = args.key_strides = args.value_strides = args.out_strides = rows;
  args.key = keys;
  args.value = values;
  args.kv_len = kCapacity;
  args.kv_lens = &length;
  args.causal = args.q_offset_end = 1;

  // The prompt, on all CPUs. A cache holds its keys and values from then on.
  args.q_len = kPrompt;
  args.query = queries;
  args.out = outputs;
  const char* error = attnpack_attention(&args, NULL);
  double most = error ? 0 : difference(0, kPrompt);
  printf("prompt  differs by %.1e\n", most);

  // Token after token, on threads of this program.
  int calls = 0;
  const attnpack_threads threads = {2, run_here, &calls};
  args.q_len = 1;
  for (int t = kPrompt; t < kCapacity && !error; ++t) {
    length = t + 1;
    args.query = queries[0][t];
    args.out = outputs[0][t];
    error = attnpack_attention(&args, &threads);
  }
  if (!error) most = fmax(most, difference(kPrompt, kCapacity));
  printf("decode  differs by %.1e\n", most);

  // A wrong argument is named, and nothing is written.
  length = kCapacity + 1;
  const char* wrong = attnpack_attention(&args, NULL);
  printf("wrong   %s\n", wrong ? wrong : "was not noticed");
  if (error) fprintf(stderr, "%s\n", error);
  return error || most > 1e-5 || !wrong;
}
