// Buckets: made for a table in a pool, and unmade.
#include "store/bucket.h"

#include "store/row_pool.h"
#include "store/table.h"

namespace embertide {

Bucket::~Bucket() { index.Clear(&pool->index_pages); }

Bucket::Bucket(RowPool* on, const Table& of, uint32_t number)
    : index(
          on->index == IndexKind::kPlain
              ? LeanShape()
              : LeanShape::Of(of.config.layout, number, of.config.bucket_bits, on->arena.slots())),
      rows(on->arena.base()),
      chunk_bytes(of.config.layout.chunk_bytes()),
      scale_bytes(static_cast<uint16_t>(of.config.layout.scale_bytes())),
      full_mask(of.config.layout.full_mask()),
      table(of.ordinal),
      pool(on) {}

}  // namespace embertide
