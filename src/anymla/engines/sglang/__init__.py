"""Plugin for SGLang: anymla's sparse attention, selection and audit through SGLang's hooks."""
