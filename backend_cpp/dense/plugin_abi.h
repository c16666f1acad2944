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

#define EMBERTIDE_DENSE_ABI 2
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

typedef struct {
  uint32_t dense_features;
  uint32_t embedding_dim;
  uint32_t heads;  // scores of a sample
} EmbertideDenseShape;

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
  // Copies the tensors. Thread-safe.
  int (*load)(const EmbertideDenseProgram* program, const EmbertideDenseTensor* tensors,
              size_t count, EmbertideDenseWeights** weights, char* error, size_t capacity);
  void (*drop)(EmbertideDenseWeights* weights);
  // One thread of a program at a time. `scores`: an array of `batch` for each head.
  int (*run)(EmbertideDenseProgram* program, const EmbertideDenseWeights* weights, int64_t batch,
             const float* dense, const float* embeddings, float* const* scores, char* error,
             size_t capacity);
};

// What EMBERTIDE_DENSE_ENTRY names.
typedef const struct EmbertideDensePlugin* (*EmbertideDenseEntry)(void);

#ifdef __cplusplus
}
#endif
