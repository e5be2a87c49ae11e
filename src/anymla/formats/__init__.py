"""What bytes mean: number formats, page layouts, and their encoders and decoders."""
