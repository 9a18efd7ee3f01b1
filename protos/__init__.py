"""Wire formats: protobuf sources and the modules generated from them."""
