// The C ABI between the backend and libembertide_dense.so, the one library that links torch.
//
// Every function returns 0, or another value with a text in `error` (NUL-terminated, cut to
// `capacity`). No C++ type and no exception crosses. A change of any struct raises
// EMBERTIDE_DENSE_ABI.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define EMBERTIDE_DENSE_ABI 5
#define EMBERTIDE_DENSE_ENTRY "embertide_dense_plugin"

typedef struct EmbertideDenseProgram EmbertideDenseProgram;
typedef struct EmbertideDenseWeights EmbertideDenseWeights;

// fp32, row-major; lives as long as the call.
typedef struct {
  const char* name;
  const int64_t* shape;
  size_t rank;
  const float* values;
} EmbertideDenseTensor;

typedef enum {
  EMBERTIDE_DENSE_REDUCED_NONE = 0,     // the package has no program in reduced precision
  EMBERTIDE_DENSE_REDUCED_READY = 1,    // it has one, which this CPU can run
  EMBERTIDE_DENSE_REDUCED_NO_CPU = 2,   // it has one, and this CPU lacks the instructions
  EMBERTIDE_DENSE_REDUCED_UNKNOWN = 3,  // it has one in a type that this build does not know
} EmbertideDenseReduced;

typedef struct {
  uint32_t dense_features;
  uint32_t embedding_dim;
  uint32_t heads;  // scores of a sample
  EmbertideDenseReduced reduced;
  const char* reduced_type;  // "bf16", "int8"; the program's own; null without
  // If the program takes users and candidates, too: a byte for each column of DENSE and of the
  // embeddings, 1 for the user's; the program's own. Null without.
  const uint8_t* context_dense;
  const uint8_t* context_embeddings;
} EmbertideDenseShape;

// Users and their candidates, fp32, row-major: each has its own columns, in the order that they
// have in the whole row. Lives as long as the call.
typedef struct {
  int64_t users;       // at least 1
  int64_t candidates;  // at least 1
  const float* context_dense;
  const float* context_embeddings;
  const float* candidate_dense;
  const float* candidate_embeddings;
  const int64_t* user_of;  // by candidate, below `users`
} EmbertideDenseContexts;

typedef enum {
  EMBERTIDE_DENSE_OK = 0,
  EMBERTIDE_DENSE_FAILED = 1,    // torch failed
  EMBERTIDE_DENSE_REJECTED = 2,  // the package or the tensors are not what they should be
} EmbertideDenseResult;

struct EmbertideDensePlugin {
  uint32_t abi;  // EMBERTIDE_DENSE_ABI of the plugin's build
  int (*open)(const char* package, EmbertideDenseProgram** program, EmbertideDenseShape* shape,
              char* error, size_t capacity);
  void (*close)(EmbertideDenseProgram* program);
  // Copies the tensors; with `reduced` not 0, runs of many samples multiply in reduced precision,
  // by weights that are converted here. Requires: then a program whose shape says
  // EMBERTIDE_DENSE_REDUCED_READY. Thread-safe.
  int (*load)(const EmbertideDenseProgram* program, const EmbertideDenseTensor* tensors,
              size_t count, int reduced, EmbertideDenseWeights** weights, char* error,
              size_t capacity);
  void (*drop)(EmbertideDenseWeights* weights);
  // One thread of a program at a time. `scores`: an array of `batch` for each head.
  int (*run)(EmbertideDenseProgram* program, const EmbertideDenseWeights* weights, int64_t batch,
             const float* dense, const float* embeddings, float* const* scores, char* error,
             size_t capacity);
  // The same of users and candidates. Requires: a program whose shape has `context_embeddings`.
  int (*run_contexts)(EmbertideDenseProgram* program, const EmbertideDenseWeights* weights,
                      const EmbertideDenseContexts* request, float* const* scores, char* error,
                      size_t capacity);
};

// The type of the function that EMBERTIDE_DENSE_ENTRY names.
typedef const struct EmbertideDensePlugin* (*EmbertideDenseEntry)(void);

#ifdef __cplusplus
}
#endif
