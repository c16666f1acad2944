"""Dense nets: (dense_BD, embeddings_BE) -> scores_B, and their export for serving."""
