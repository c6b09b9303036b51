// Without -fmad=false, the compiler would fuse the product and the difference.
__global__ void descend(float* weight, const float* grad, float lr, long count) {
  const long i = blockIdx.x * static_cast<long>(blockDim.x) + threadIdx.x;
  if (i < count) weight[i] = weight[i] - grad[i] * lr;
}

void descend_on_device(float* weight, const float* grad, float lr, long count) {
  descend<<<static_cast<unsigned>((count + 255) / 256), 256>>>(weight, grad, lr, count);
}
