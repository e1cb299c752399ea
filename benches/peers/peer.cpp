// Measures llama.cpp on one GGUF file and prints one JSON object: decoding, prefill, and passes of T tokens as
// a verification of drafts makes them, that is, with the logits of all T rows. llama-bench computes the last row's only.
//
// usage: peer MODEL.gguf THREADS

#include "llama.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace {

constexpr int HELD = 64;  // tokens in the cache before a decode step or a verification
constexpr int DECODED = 64;
constexpr int PASSES = 7;
constexpr int ROWS[] = {1, 2, 4, 5, 6, 8, 16};
constexpr int PROMPTS[] = {128, 512, 2048};

using Clock = std::chrono::steady_clock;

double ms_since(Clock::time_point start) {
    return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

[[noreturn]] void fail(const std::string & what) {
    std::fprintf(stderr, "peer: %s\n", what.c_str());
    std::exit(1);
}

double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    const size_t half = values.size() / 2;
    return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

// llama.cpp says where it put the weights, and so whether it repacked them, in its log alone.
std::vector<std::string> buffers;

void log(ggml_log_level level, const char * text, void *) {
    std::string line = text;
    if (line.find("model buffer size") != std::string::npos) {
        line = line.substr(line.find(':') + 1);
        line.erase(0, line.find_first_not_of(' '));
        line.erase(line.find_last_not_of(" \n") + 1);
        buffers.push_back(line);
    }
    if (level == GGML_LOG_LEVEL_ERROR) {
        std::fputs(text, stderr);
    }
}

using Model = std::unique_ptr<llama_model, decltype(&llama_model_free)>;

enum class Rows { Last, All };

class Context {
  public:
    // With `way_back` > 0, that many of the newest tokens can be taken back: llama.cpp keeps a copy of the
    // recurrent states for each.
    Context(const Model & model, int threads, int way_back) : inner(nullptr, llama_free) {
        auto params = llama_context_default_params();
        params.n_ctx = 4096;
        params.n_batch = 2048;
        params.n_rs_seq = way_back;
        params.n_threads = threads;
        params.n_threads_batch = threads;
        inner.reset(llama_init_from_model(model.get(), params));
        if (!inner) {
            fail("no context could be made for the model");
        }
    }

    void clear() {
        llama_memory_clear(llama_get_memory(inner.get()), true);
        position = 0;
    }

    // Time of one call with `count` more tokens, until their logits can be read.
    double decode(int count, Rows rows) {
        llama_batch batch = llama_batch_init(count, 0, 1);
        batch.n_tokens = count;
        for (int i = 0; i < count; ++i) {
            batch.token[i] = (position + i) % 1000;
            batch.pos[i] = position + i;
            batch.n_seq_id[i] = 1;
            batch.seq_id[i][0] = 0;
            batch.logits[i] = rows == Rows::All || i + 1 == count;
        }
        const auto start = Clock::now();
        if (llama_decode(inner.get(), batch) != 0) {
            fail("a decode of " + std::to_string(count) + " tokens failed");
        }
        if (llama_get_logits_ith(inner.get(), rows == Rows::All ? 0 : count - 1) == nullptr) {
            fail("the logits of a decode are missing");
        }
        const double time = ms_since(start);
        llama_batch_free(batch);
        position += count;
        return time;
    }

    void take_back(int count) {
        position -= count;
        if (!llama_memory_seq_rm(llama_get_memory(inner.get()), 0, position, -1)) {
            fail("the newest " + std::to_string(count) + " tokens could not be taken back");
        }
    }

  private:
    std::unique_ptr<llama_context, decltype(&llama_free)> inner;
    int position = 0;
};

double decode_tokens_per_s(const Model & model, int threads) {
    Context context(model, threads, 0);
    context.decode(HELD, Rows::Last);
    std::vector<double> times;
    for (int i = 0; i < DECODED; ++i) {
        times.push_back(context.decode(1, Rows::Last));
    }
    return 1000 / median(times);
}

std::map<int, double> prefill_tokens_per_s(const Model & model, int threads) {
    Context context(model, threads, 0);
    context.decode(HELD, Rows::Last);
    std::map<int, double> speeds;
    for (int prompt : PROMPTS) {
        std::vector<double> times;
        for (int i = 0; i < std::max(1, 1024 / prompt); ++i) {
            context.clear();
            times.push_back(context.decode(prompt, Rows::Last));
        }
        speeds[prompt] = 1000 * prompt / median(times);
    }
    return speeds;
}

enum class Drafts { Stay, GoBack };

// Passes of T tokens with the logits of all, one after another, so that llama.cpp can use its graph again. Drafts that go
// back make a round of speculation in which none is accepted: T - 1 tokens are taken back within the time.
std::map<int, double> pass_ms(const Model & model, int threads, Drafts drafts) {
    std::map<int, double> medians;
    for (int rows : ROWS) {
        const int back = drafts == Drafts::GoBack ? rows - 1 : 0;
        Context context(model, threads, back);
        context.decode(HELD, Rows::Last);
        context.decode(rows, Rows::All);
        std::vector<double> times;
        for (int i = 0; i < PASSES; ++i) {
            const double pass = context.decode(rows, Rows::All);
            const auto start = Clock::now();
            if (back > 0) {
                context.take_back(back);
            }
            times.push_back(pass + ms_since(start));
        }
        medians[rows] = median(times);
    }
    return medians;
}

void print(const char * name, const std::map<int, double> & values) {
    std::printf("\"%s\": {", name);
    const char * comma = "";
    for (const auto & [key, value] : values) {
        std::printf("%s\"%d\": %.3f", comma, key, value);
        comma = ", ";
    }
    std::printf("}");
}

void print(const char * name, const std::vector<std::string> & values) {
    std::printf("\"%s\": [", name);
    const char * comma = "";
    for (const auto & value : values) {
        std::printf("%s\"%s\"", comma, value.c_str());
        comma = ", ";
    }
    std::printf("]");
}

}  // namespace

int main(int argc, char ** argv) {
    const int threads = argc == 3 ? std::atoi(argv[2]) : 0;
    if (threads < 1) {
        fail("usage: peer MODEL.gguf THREADS, with at least one thread");
    }
    llama_log_set(log, nullptr);
    llama_backend_init();
    const Model model(llama_model_load_from_file(argv[1], llama_model_default_params()), llama_model_free);
    if (!model) {
        fail(std::string("cannot load ") + argv[1]);
    }

    const double decode = decode_tokens_per_s(model, threads);
    const auto verify = pass_ms(model, threads, Drafts::Stay);
    const auto rounds = pass_ms(model, threads, Drafts::GoBack);
    const auto prefill = prefill_tokens_per_s(model, threads);

    std::printf("{\"decode_tokens_per_s\": %.3f, ", decode);
    print("verify_ms", verify);
    std::printf(", ");
    print("round_ms", rounds);
    std::printf(", ");
    print("prefill", prefill);
    std::printf(", ");
    print("buffers", buffers);
    std::printf(", \"system\": \"%s\"}\n", llama_print_system_info());
    return 0;
}
