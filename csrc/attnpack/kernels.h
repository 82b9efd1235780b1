#ifndef ATTNPACK_KERNELS_H
#define ATTNPACK_KERNELS_H

// Attention over raw pointers on the CPU: libattnpack_kernels.so, for programs without torch. C99 or C++.
// The library is the same for every torch. It gives the bits that attnpack.attention gives in Python.

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif
#ifdef __GNUC__
#pragma GCC visibility push(default)
#endif

// The type of a number in memory. A bool is a byte, 0 or 1.
typedef enum attnpack_dtype {
  ATTNPACK_FLOAT64,
  ATTNPACK_FLOAT32,
  ATTNPACK_BFLOAT16,
  ATTNPACK_FLOAT16,
  ATTNPACK_BOOL
} attnpack_dtype;

// Distances between neighbours of a tensor [batch, heads, rows, width], in elements. The numbers of a row lie side by
// side. Where all three are 0, the tensor is contiguous.
typedef struct attnpack_strides {
  int64_t batch, head, row;
} attnpack_strides;

// The arguments of attnpack_attention. Begin with attnpack_attention_defaults(): a new release adds members at the end,
// and reads as many as the program was compiled with. The meaning is that of attnpack.attention.
typedef struct attnpack_attention_args {
  size_t struct_size;    // set by attnpack_attention_defaults()
  attnpack_dtype dtype;  // of query, key, value and out
  int64_t batch, num_heads, num_kv_heads, q_len, kv_len, head_dim, v_head_dim;

  const void* query;  // [batch, num_heads, q_len, head_dim]
  const void* key;    // [batch, num_kv_heads, kv_len, head_dim]
  const void* value;  // [batch, num_kv_heads, kv_len, v_head_dim]
  void* out;          // [batch, num_heads, q_len, v_head_dim]
  attnpack_strides query_strides, key_strides, value_strides, out_strides;
  void* lse;  // [batch, num_heads, q_len], contiguous, float (double for float64): log of the denominators; or NULL

  double scale;                       // of the products of queries and keys; 0: 1 / sqrt(head_dim)
  double softcap;                     // c: c * tanh(s / c); 0: none
  int32_t causal;                     // query i attends keys up to i + q_offset
  int32_t q_offset_end;               // not 0: q_offset is the number of valid keys - q_len, as a decode wants it
  int64_t q_offset;                   // the position of query 0
  int64_t window_left, window_right;  // keys from i + q_offset - left to i + q_offset + right; -1: unbounded
  int64_t chunk;                      // keys of the query's chunk of so many positions; 0: all
  const int64_t* kv_lens;             // [batch] valid keys of each sequence, which may hold more; NULL: kv_len
  const int64_t* head_map;            // [num_heads] the kv head of each query head; NULL: groups of equal size
  const double* sinks;                // [num_heads] logits that join the denominators; or NULL
  const double* alibi_slopes;         // [num_heads] or NULL

  const void* mask;           // [batch, num_heads, q_len, kv_len] or NULL; bool: true may be attended; else added
  attnpack_dtype mask_dtype;  // ATTNPACK_BOOL, or a floating type
  int64_t mask_strides[4];    // in elements; 0 repeats the mask; all 0: contiguous

  // Keys in pages, for caches that grow. Then key and value are pools [num_pages, num_kv_heads, page_size, width], and
  // the batch stride is that of a page. kv_len is the most keys of a sequence.
  const int32_t* block_table;  // [batch, table_stride]: the pages of each sequence, as many as its keys take; or NULL
  int64_t table_stride, page_size, num_pages;
} attnpack_attention_args;

// Arguments without anything optional: all 0 or NULL, windows unbounded.
static inline attnpack_attention_args attnpack_attention_defaults(void) {
  attnpack_attention_args args;
  memset(&args, 0, sizeof(args));
  args.struct_size = sizeof(args);
  args.dtype = ATTNPACK_FLOAT32;
  args.window_left = args.window_right = -1;
  return args;
}

// The threads of a call. Results do not depend on them.
typedef struct attnpack_threads {
  int64_t count;  // threads that work, the calling one among them; 0: one for each CPU of the process
  // How work comes to other threads: calls work(context) at the same time on as many as `count` threads, at least on
  // one, and returns when these calls have returned. NULL: by threads of the library, which sleep between calls.
  void (*run)(void* runner, int64_t count, void (*work)(void* context), void* context);
  void* runner;  // the first argument of run
} attnpack_threads;

// Computes out, and lse where it is given. Returns NULL. If an argument is wrong, it writes nothing and returns a
// sentence that names the argument, which lasts until this thread's next call. threads may be NULL: all CPUs.
const char* attnpack_attention(const attnpack_attention_args* args, const attnpack_threads* threads);

// The version of the library that runs, such as "0.1.0".
const char* attnpack_kernels_version(void);

// The instruction set that runs, such as "avx512": the fastest that the CPU has, or the one that the environment
// variable ATTNPACK_ISA names. NULL if the CPU lacks what it names.
const char* attnpack_kernels_instruction_set(void);

#ifdef __GNUC__
#pragma GCC visibility pop
#endif
#ifdef __cplusplus
}  // extern "C"
#endif

#endif
