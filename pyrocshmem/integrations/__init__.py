"""The fused ops inside other libraries. Each module is for one library, which it imports: only who asks for a module
needs its library."""
