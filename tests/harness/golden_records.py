"""Golden bytes of every record: what a version of kvlane wrote is read by all later ones.

The bytes of a new record, or of one with a new field, to be added as a row of its own (those of
earlier rows never change):

    python -c 'from tests.harness.golden_records import *; from kvlane.streams.codecs import encode
    print(encode(REQUEST, "").value.hex())'
"""

from __future__ import annotations

import struct

from kvlane.streams import records as r
from kvlane.streams import request as q
from kvlane.streams.codecs import AnyRecord, pack_tokens
from kvlane.streams.record_types import batch_records as b
from kvlane.streams.response_records import TurnPlace

ORIGIN = r.RequestOffset(topic="requests", partition=17, offset=4711)
CANDIDATE_ROWS = struct.pack(
    "<" + 2 * "d10q5d",
    *(1.5, 2, 300, 4, 3, 2, 64, 250, 1, 4096, 65_536, 12.5, 1.25, 5.0, 0.25, 7.5),
    *(2.5, 1, 200, 0, 0, 0, 0, 150, 0, 4096, 65_536, 0.0, 1.0, 0.0, 0.0, 0.0),
)
JOINING_ROWS = struct.pack("<6q", 120, 2, 35, 0, 0, 0)
REQUEST = q.Request(
    id="job-17",
    model="demo",
    token_ids=pack_tokens([259, 104, 105, 70_000]),
    tenant="acme",
    deadline_s=30.0,
    received_ms=1_700_000_000_000,
    stop=q.StopConditions(
        max_tokens=32, min_tokens=1, stop=("\n",), stop_token_ids=(256,), ignore_eos=True
    ),
    sampling=q.SamplingOptions(temperature=0.5, top_p=0.9, top_k=40, seed=7),
    hints=q.Hints(backend_instance_id="w1", allowed_worker_ids=("w1", "w2")),
)
WHOLE_REQUEST = q.Request(
    id="job-18",
    stop=q.StopConditions(stop_token_ids_hidden=(2,), max_thinking_tokens=9),
    sampling=q.SamplingOptions(
        n=1,
        best_of=1,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.5,
        min_p=0.25,
        use_beam_search=False,
        length_penalty=1.0,
        include_stop_str_in_output=True,
        guided_decoding=q.GuidedDecoding(
            json=b"{}",
            regex="a+",
            choice=("a", "b"),
            grammar="g",
            backend="x",
            whitespace_pattern=" ",
            structural_tag=b"[]",
        ),
        detokenize=False,
        allowed_token_ids=(),
        bad_words_token_ids=((1, 2), (3,)),
        logit_bias={7: -1.5},
    ),
    hints=q.Hints(
        prefill_worker_id="p1",
        decode_worker_id="d1",
        dp_rank=0,
        prefill_dp_rank=1,
        expected_output_tokens=50,
        lora_name="l",
        priority_jump=0.5,
        priority=-1,
        strict_priority=2,
        routing_constraints=q.RoutingConstraints(
            required_taints=("a",), preferred_taints={"b": 0.5}
        ),
        session_control=q.SessionControl(session_id="s", action="open", timeout=60),
        queue_class="batch",
    ),
    output=q.OutputOptions(
        logprobs=2,
        prompt_logprobs=1,
        skip_special_tokens=False,
        formatted_prompt=True,
        return_tokens_as_token_ids=True,
    ),
    eos_token_ids=(2, 3),
    mdc_sum="aa",
    annotations=("x", "k:v"),
    cache_salt="salt",
    prompt_embeds="AAAA",
    multi_modal_data={
        "image_url": (
            q.MultimodalData(kind="url", url="http://a/b"),
            q.MultimodalData(kind="decoded", decoded=b"{}"),
        )
    },
    mm_routing_info=q.MmRoutingInfo(
        routing_token_ids=pack_tokens([5]),
        block_mm_infos=(
            None,
            q.BlockExtraInfo(mm_objects=(q.MmObject(mm_hash=2**64 - 1, offsets=((0, 3),)),)),
        ),
    ),
    router_config_override=q.RouterConfigOverride(
        overlap_score_credit=0.5,
        prefill_load_scale=1.5,
        router_temperature=0.25,
        assume_kv_reuse=False,
        track_prefill_tokens=False,
        shared_cache_multiplier=0.5,
    ),
    prefill_result=q.PrefillResult(
        disaggregated_params=b"{}",
        prompt_tokens_details=q.PromptTokensDetails(audio_tokens=1, cached_tokens=2),
    ),
    migration_link=q.TraceLink(trace_id="ab", span_id="cd"),
    bootstrap_info=q.BootstrapInfo(
        bootstrap_host="h", bootstrap_port=9000, bootstrap_room=2**63 - 1
    ),
    extra_args=b"[1]",
    router=q.RouterParams(ttft_target=100.0, itl_target=20.0),
    agent_context=b'{"a":1}',
    mm_processor_kwargs=b"null",
    request_timestamp_ms=1.5,
    is_probe=True,
    body=q.OpenAiBody(kind="chat", json=b'{"messages":[]}', prompt_tokens=3),
)

QUEUED_REQUEST = q.Request(
    id="job-17",
    queued_ms=1_700_000_000_000,
    service_class="batch",
    is_renewed=True,
    result=q.ResultOptions(
        kind="completion",
        metadata=b'{"a":1}',
        batch_id="batch_1",
        custom_id="line-7",
        reply=q.ReplyAddress(topic="replies", headers=(("correlation_id", b"\x00x"),), partition=3),
        echo="Once",
    ),
)
ALIASED_REQUEST = q.Request(id="a", model="m", alias="chat")
BILLED_REQUEST = q.Request(id="a", key_id="5f3e7c96a0b1")
ACCOUNT = r.Account("acme", "5f", "demo", "a", "batch", "chat")
TRACED_REQUEST = q.Request(id="a", traceparent=f"00-{'1' * 32}-{'2' * 16}-01")
PARSED_REQUEST = q.Request(
    id="a",
    parsing=q.AnswerParsing(
        tools="hermes", reasoning="qwen3", version=2, in_reasoning=True, shows_reasoning=False,
        max_calls=1,
    ),
)  # fmt: skip
RENEWED_REQUEST = q.Request(
    id="a",
    is_renewed=True,
    shown=r.Chunk(
        id="a", attempt=1, run="", seq=0, index=0, token_ids=(240, 159), text="x", chars=1
    ),
)

# fmt: off
GOLDEN: list[tuple[AnyRecord, bytes]] = [
    (q.Request(id="job-17"), bytes.fromhex("de0001a26964a66a6f622d3137")),
    (ALIASED_REQUEST, bytes.fromhex("de0003a26964a161a56d6f64656ca16da5616c696173a463686174")),
    (
        REQUEST,
        bytes.fromhex(
            "de0009a26964a66a6f622d3137a56d6f64656ca464656d6fa9746f6b656e5f696473c41003010000680000"
            "006900000070110100a674656e616e74a461636d65aa646561646c696e655f73cb403e000000000000ab72"
            "656365697665645f6d73cf0000018bcfe56800a473746f7085aa6d61785f746f6b656e7320aa6d696e5f74"
            "6f6b656e7301a473746f7091a10aae73746f705f746f6b656e5f69647391cd0100aa69676e6f72655f656f"
            "73c3a873616d706c696e67de0004ab74656d7065726174757265cb3fe0000000000000a5746f705f70cb3f"
            "eccccccccccccda5746f705f6b28a47365656407a568696e747382b36261636b656e645f696e7374616e63"
            "655f6964a27731b2616c6c6f7765645f776f726b65725f69647392a27731a27732"
        ),
    ),
    (
        WHOLE_REQUEST,
        bytes.fromhex(
            "de0017a26964a66a6f622d3138a473746f7082b573746f705f746f6b656e5f6964735f68696464656e9102"
            "b36d61785f7468696e6b696e675f746f6b656e7309a873616d706c696e67de000ea16e01a7626573745f6f"
            "6601b070726573656e63655f70656e616c7479cb3fe0000000000000b16672657175656e63795f70656e61"
            "6c7479cbbfe0000000000000b272657065746974696f6e5f70656e616c7479cb3ff8000000000000a56d69"
            "6e5f70cb3fd0000000000000af7573655f6265616d5f736561726368c2ae6c656e6774685f70656e616c74"
            "79cb3ff0000000000000ba696e636c7564655f73746f705f7374725f696e5f6f7574707574c3af67756964"
            "65645f6465636f64696e6787a46a736f6ec4027b7da57265676578a2612ba663686f69636592a161a162a7"
            "6772616d6d6172a167a76261636b656e64a178b2776869746573706163655f7061747465726ea120ae7374"
            "727563747572616c5f746167c4025b5daa6465746f6b656e697a65c2b1616c6c6f7765645f746f6b656e5f"
            "69647390b36261645f776f7264735f746f6b656e5f696473929201029103aa6c6f6769745f626961738107"
            "cbbff8000000000000a568696e74738cb170726566696c6c5f776f726b65725f6964a27031b06465636f64"
            "655f776f726b65725f6964a26431a764705f72616e6b00af70726566696c6c5f64705f72616e6b01b66578"
            "7065637465645f6f75747075745f746f6b656e7332a96c6f72615f6e616d65a16cad7072696f726974795f"
            "6a756d70cb3fe0000000000000a87072696f72697479ffaf7374726963745f7072696f7269747902b3726f"
            "7574696e675f636f6e73747261696e747382af72657175697265645f7461696e747391a161b07072656665"
            "727265645f7461696e747381a162cb3fe0000000000000af73657373696f6e5f636f6e74726f6c83aa7365"
            "7373696f6e5f6964a173a6616374696f6ea46f70656ea774696d656f75743cab71756575655f636c617373"
            "a56261746368a66f757470757485a86c6f6770726f627302af70726f6d70745f6c6f6770726f627301b373"
            "6b69705f7370656369616c5f746f6b656e73c2b0666f726d61747465645f70726f6d7074c3ba7265747572"
            "6e5f746f6b656e735f61735f746f6b656e5f696473c3ad656f735f746f6b656e5f696473920203a76d6463"
            "5f73756da26161ab616e6e6f746174696f6e7392a178a36b3a76aa63616368655f73616c74a473616c74ad"
            "70726f6d70745f656d62656473a441414141b06d756c74695f6d6f64616c5f6461746181a9696d6167655f"
            "75726c9282a46b696e64a375726ca375726caa687474703a2f2f612f6282a46b696e64a76465636f646564"
            "a76465636f646564c4027b7daf6d6d5f726f7574696e675f696e666f82b1726f7574696e675f746f6b656e"
            "5f696473c40405000000ae626c6f636b5f6d6d5f696e666f7392c081aa6d6d5f6f626a656374739182a76d"
            "6d5f68617368cfffffffffffffffffa76f66667365747391920003b6726f757465725f636f6e6669675f6f"
            "7665727269646586b46f7665726c61705f73636f72655f637265646974cb3fe0000000000000b270726566"
            "696c6c5f6c6f61645f7363616c65cb3ff8000000000000b2726f757465725f74656d7065726174757265cb"
            "3fd0000000000000af617373756d655f6b765f7265757365c2b4747261636b5f70726566696c6c5f746f6b"
            "656e73c2b77368617265645f63616368655f6d756c7469706c696572cb3fe0000000000000ae7072656669"
            "6c6c5f726573756c7482b4646973616767726567617465645f706172616d73c4027b7db570726f6d70745f"
            "746f6b656e735f64657461696c7382ac617564696f5f746f6b656e7301ad6361636865645f746f6b656e73"
            "02ae6d6967726174696f6e5f6c696e6b82a874726163655f6964a26162a77370616e5f6964a26364ae626f"
            "6f7473747261705f696e666f83ae626f6f7473747261705f686f7374a168ae626f6f7473747261705f706f"
            "7274cd2328ae626f6f7473747261705f726f6f6dcf7fffffffffffffffaa65787472615f61726773c4035b"
            "315da6726f7574657282ab747466745f746172676574cb4059000000000000aa69746c5f746172676574cb"
            "4034000000000000ad6167656e745f636f6e74657874c4077b2261223a317db36d6d5f70726f636573736f"
            "725f6b7761726773c4046e756c6cb4726571756573745f74696d657374616d705f6d73cb3ff80000000000"
            "00ad5f4845414c54485f434845434bc3a4626f647983a46b696e64a463686174a46a736f6ec40f7b226d65"
            "737361676573223a5b5d7dad70726f6d70745f746f6b656e7303"
        ),
    ),
    (
        r.Cancel(id="job-17", reason="gone"),
        bytes.fromhex("82a26964a66a6f622d3137a6726561736f6ea4676f6e65"),
    ),
    (
        r.Refused(id="job-17", code="too_large", message="9000 tokens"),
        bytes.fromhex(
            "83a26964a66a6f622d3137a4636f6465a9746f6f5f6c61726765a76d657373616765ab3930303020746f6b"
            "656e73"
        ),
    ),
    (
        r.Refused(
            id="job-17", code="invalid", message="no", result=q.ResultOptions(custom_id="line-7"),
        ),
        bytes.fromhex(
            "84a26964a66a6f622d3137a4636f6465a7696e76616c6964a76d657373616765a26e6fa6726573756c7481"
            "a9637573746f6d5f6964a66c696e652d37"
        ),
    ),
    (
        r.Assigned(
            id="job-17", attempt=1, phase="aggregated", worker="w1", epoch=12, origin=ORIGIN,
            responses_from=99, deadline_ms=1_700_000_030_000, rank=1, base_tokens=3,
            prompt_tokens=4, policy="kv", seed=7, listed=(r.Candidate(worker="w1", epoch=12,
            rank=1, cost=1.5, open_runs=2, open_tokens=300, overlap_blocks=4, host_blocks=3,
            disk_blocks=2, prefill_tokens=64, taint_weight=0.5, prompt_tokens=250, prefill_runs=1,
            busy_ms=12.5, ahead_ms=(20.5,), slowness=1.25, chunk_tokens=4096,
            capacity_tokens=65_536, curve=(0.0, 0.5, 16.0, 0.0, 0.0, 8.0, 1.0)),), router="r1",
            cached_tokens_predicted=5, prefill_tokens=2, block_size=16,
            params={"temperature": 0.5}, held_ms=40, ttft_ms_predicted=62.5,
            known_ms=1_700_000_000_000,
        ),
        bytes.fromhex(
            "de0016a26964a66a6f622d3137a7617474656d707401a57068617365aa61676772656761746564a6776f72"
            "6b6572a27731a565706f63680ca66f726967696e83a5746f706963a87265717565737473a9706172746974"
            "696f6e11a66f6666736574cd1267ae726573706f6e7365735f66726f6d63ab646561646c696e655f6d73cf"
            "0000018bcfe5dd30a472616e6b01ab626173655f746f6b656e7303ad70726f6d70745f746f6b656e7304a6"
            "706f6c696379a26b76a47365656407aa63616e6469646174657391de0013a6776f726b6572a27731a56570"
            "6f63680ca472616e6b01a4636f7374cb3ff8000000000000a96f70656e5f72756e7302ab6f70656e5f746f"
            "6b656e73cd012cae6f7665726c61705f626c6f636b7304ab686f73745f626c6f636b7303ab6469736b5f62"
            "6c6f636b7302ae70726566696c6c5f746f6b656e7340ac7461696e745f776569676874cb3fe00000000000"
            "00ad70726f6d70745f746f6b656e73ccfaac70726566696c6c5f72756e7301a7627573795f6d73cb402900"
            "0000000000a861686561645f6d7391cb4034800000000000a8736c6f776e657373cb3ff4000000000000ac"
            "6368756e6b5f746f6b656e73cd1000af63617061636974795f746f6b656e73ce00010000a5637572766597"
            "cb0000000000000000cb3fe0000000000000cb4030000000000000cb0000000000000000cb000000000000"
            "0000cb4020000000000000cb3ff0000000000000a6726f75746572a27231b76361636865645f746f6b656e"
            "735f70726564696374656405ae70726566696c6c5f746f6b656e7302aa626c6f636b5f73697a6510a67061"
            "72616d7381ab74656d7065726174757265cb3fe0000000000000a768656c645f6d7328b1747466745f6d73"
            "5f707265646963746564cb404f400000000000a86b6e6f776e5f6d73cf0000018bcfe56800"
        ),
    ),
    (
        r.Started(
            id="job-17", attempt=1, phase="decode", worker="w1", epoch=12, run=2**64 - 1,
            origin=ORIGIN, responses_from=99, deadline_ms=1_700_000_030_000, prompt_tokens=4,
        ),
        bytes.fromhex(
            "8aa26964a66a6f622d3137a7617474656d707401a57068617365a66465636f6465a6776f726b6572a27731"
            "a565706f63680ca372756ecfffffffffffffffffa66f726967696e83a5746f706963a87265717565737473"
            "a9706172746974696f6e11a66f6666736574cd1267ae726573706f6e7365735f66726f6d63ab646561646c"
            "696e655f6d73cf0000018bcfe5dd30ad70726f6d70745f746f6b656e7304"
        ),
    ),
    (
        r.PrefillDone(
            id="job-17", attempt=0, phase="prefill", worker="w1", epoch=12, run=11, cached_tokens=2,
            ttft_ms=12.5, prefill_ms=10.0, handoff=b"\x81\xa1x\x01",
        ),
        bytes.fromhex(
            "8aa26964a66a6f622d3137a7617474656d707400a57068617365a770726566696c6ca6776f726b6572a277"
            "31a565706f63680ca372756e0bad6361636865645f746f6b656e7302a7747466745f6d73cb402900000000"
            "0000aa70726566696c6c5f6d73cb4024000000000000a768616e646f6666c40481a17801"
        ),
    ),
    (
        r.PrefillDone(
            id="job-17", attempt=0, phase="prefill", worker="w1", epoch=12, run=11,
            handoff=b'{"a": 1}', lease_until_ms=1500,
        ),
        bytes.fromhex(
            "88a26964a66a6f622d3137a7617474656d707400a57068617365a770726566696c6ca6776f726b6572a277"
            "31a565706f63680ca372756e0ba768616e646f6666c4087b2261223a20317dae6c656173655f756e74696c"
            "5f6d73cd05dc"
        ),
    ),
    (
        r.Finished(
            id="job-17", attempt=0, phase="aggregated", worker="w1", epoch=12, code="error", run=11,
            output_tokens=5, cached_tokens=2, ttft_ms=12.5, itl_ms=3.25, retryable=True,
            message="out of memory",
        ),
        bytes.fromhex(
            "de000da26964a66a6f622d3137a7617474656d707400a57068617365aa61676772656761746564a6776f726b65"
            "72a27731a565706f63680ca4636f6465a56572726f72a372756e0bad6f75747075745f746f6b656e7305ad"
            "6361636865645f746f6b656e7302a7747466745f6d73cb4029000000000000a669746c5f6d73cb400a0000"
            "00000000a9726574727961626c65c3a76d657373616765ad6f7574206f66206d656d6f7279"
        ),
    ),
    (
        r.Fencing(id="job-17", attempt=1, reason="lost"),
        bytes.fromhex("83a26964a66a6f622d3137a7617474656d707401a6726561736f6ea46c6f7374"),
    ),
    (
        r.Ended(id="job-17", code="seen"),
        bytes.fromhex("82a26964a66a6f622d3137a4636f6465a47365656e"),
    ),
    (
        r.Ended(id="job-17", code="invalid", is_prompt=True),
        bytes.fromhex(
            "83a26964a66a6f622d3137a4636f6465a7696e76616c6964a969735f70726f6d7074c3"
        ),
    ),
    (
        r.EndedIds(lane=3, until=4711, digests=bytes(range(8)), ended_s=bytes(range(4))),
        bytes.fromhex(
            "84a46c616e6503a5756e74696ccd1267a764696765737473c4080001020304050607a7656e646564"
            "5f73c40400010203"
        ),
    ),
    (
        r.Refused(id="job-17", code="deadline", queued_ms=1_700_000_000_000),
        bytes.fromhex(
            "83a26964a66a6f622d3137a4636f6465a8646561646c696e65a97175657565645f6d73cf0000018b"
            "cfe56800"
        ),
    ),
    (
        r.Started(
            id="job-17", attempt=1, phase="decode", worker="w1", epoch=4711, run=7,
            origin=ORIGIN, responses_from=3, deadline_ms=9, is_prompt=True
        ),
        bytes.fromhex(
            "8aa26964a66a6f622d3137a7617474656d707401a57068617365a66465636f6465a6776f726b6572"
            "a27731a565706f6368cd1267a372756e07a66f726967696e83a5746f706963a87265717565737473"
            "a9706172746974696f6e11a66f6666736574cd1267ae726573706f6e7365735f66726f6d03ab6465"
            "61646c696e655f6d7309a969735f70726f6d7074c3"
        ),
    ),
    (
        r.Assigned(
            id="job-17", attempt=1, phase="decode", worker="w1", epoch=4711,
            origin=ORIGIN, responses_from=3, deadline_ms=9, is_prompt=True
        ),
        bytes.fromhex(
            "de0009a26964a66a6f622d3137a7617474656d707401a57068617365a66465636f6465a6776f726b"
            "6572a27731a565706f6368cd1267a66f726967696e83a5746f706963a87265717565737473a97061"
            "72746974696f6e11a66f6666736574cd1267ae726573706f6e7365735f66726f6d03ab646561646c"
            "696e655f6d7309a969735f70726f6d7074c3"
        ),
    ),
    (
        r.Chunk(
            id="job-17", attempt=1, run="18446744073709551615", seq=2, index=4, token_ids=(240, 159,
            152, 128), text="😀", chars=5, finish_reason="stop", usage=r.Usage(prompt_tokens=7,
            completion_tokens=8, cached_tokens=2),
        ),
        (
            '{"t":"Chunk","id":"job-17","attempt":1,"run":"18446744073709551615","seq":2,"i'
            'ndex":4,"token_ids":[240,159,152,128],"text":"😀","chars":5,"finish_reason":"st'
            'op","usage":{"prompt_tokens":7,"completion_tokens":8,"cached_tokens":2}}'
        ).encode(),
    ),
    (
        r.Chunk(
            id="job-17", attempt=0, run="0", seq=0, index=0, token_ids=(5,), finish_reason="stop",
            stop_reason="\n", log_probs=((r.LogProb(5, -0.5), r.LogProb(6, -1.25)),),
        ),
        (b'{"t":"Chunk","id":"job-17","attempt":0,"run":"0","seq":0,"index":0,"token_ids"'
            b':[5],"finish_reason":"stop","stop_reason":"\\n","log_probs":[[[5,-0.5],[6,-1.25'
            b"]]]}"),
    ),
    (
        r.Chunk(
            id="job-17", attempt=0, run="0", seq=0, index=0, finish_reason="error", invalid="no",
        ),
        (b'{"t":"Chunk","id":"job-17","attempt":0,"run":"0","seq":0,"index":0,"finish_reas'
            b'on":"error","invalid":"no"}'),
    ),
    (
        r.Chunk(
            id="job-17", attempt=0, run="0", seq=0, index=0, token_ids=(5, 6), text="é", chars=1,
            token_chars=(0, 1), finish_reason="error", invalid="no", invalid_status=422,
            usage=r.Usage(prompt_tokens=7, unknown=("completion_tokens",)),
        ),
        ('{"t":"Chunk","id":"job-17","attempt":0,"run":"0","seq":0,"index":0,"token_ids":'
            '[5,6],"text":"é","chars":1,"finish_reason":"error","usage":{"prompt_tokens":7,"unk'
            'nown":["completion_tokens"]},"invalid":"no","invalid_status":422,"token_chars":[0,'
            '1]}').encode(),
    ),
    (
        r.Chunk(
            id="job-17", attempt=0, run="0", seq=3, index=0, text="ok", chars=9,
            finish_reason="tool_calls", usage=r.Usage(prompt_tokens=7,
            details={"completion_tokens_details": {"n": 1}}), data=(r.PassthroughDelta(at=7,
            delta={"tool_calls": [{"index": 0}]}), r.PassthroughDelta(at=9,
            choice={"stop_reason": None}, event={"system_fingerprint": "f"})),
        ),
        (b'{"t":"Chunk","id":"job-17","attempt":0,"run":"0","seq":3,"index":0,"text":"ok",'
            b'"chars":9,"finish_reason":"tool_calls","usage":{"prompt_tokens":7,"details":{"co'
            b'mpletion_tokens_details":{"n":1}}},"data":[{"at":7,"delta":{"tool_calls":[{"inde'
            b'x":0}]}},{"at":9,"choice":{"stop_reason":null},"event":{"system_fingerprint":"f"'
            b"}}]}"),
    ),
    (
        r.Chunk(id="job-17", attempt=0, run="0", seq=0, index=0, model="demo"),
        b'{"t":"Chunk","id":"job-17","attempt":0,"run":"0","seq":0,"index":0,"model":"demo"}',
    ),
    (
        r.Chunk(id="job-17", attempt=0, run="0", seq=0, index=0),
        b'{"t":"Chunk","id":"job-17","attempt":0,"run":"0","seq":0,"index":0}',
    ),
    (
        r.Result(
            id="job-17", status="completed", status_code=200, model="demo", kind="completion",
            body={"object": "text_completion"}, usage=r.ResultUsage(prompt_tokens=4,
            completion_tokens=2, total_tokens=6), timings=r.ResultTimings(queued_ms=1, ttft_ms=2,
            total_ms=3, finished_ms=4), attempts=1, metadata={"a": 1}, batch_id="batch_1",
            custom_id="line-7",
        ),
        (b'{"t":"Result","id":"job-17","status":"completed","status_code":200,"model":"'
            b'demo","kind":"completion","body":{"object":"text_completion"},"usage":{"prom'
            b'pt_tokens":4,"completion_tokens":2,"total_tokens":6,"cached_tokens":0},"erro'
            b'r":null,"timings":{"queued_ms":1,"ttft_ms":2,"total_ms":3,"finished_ms":4},"'
            b'attempts":1,"metadata":{"a":1},"batch_id":"batch_1","custom_id":"line-7"}'),
    ),
    (BILLED_REQUEST, bytes.fromhex(
            "de0002a26964a161a66b65795f6964ac356633653763393661306231"
        )),
    (
        r.Finished(
            id="job-17", attempt=0, phase="aggregated", worker="w1", epoch=12, code="stop",
            usage=r.Usage(prompt_tokens=4, completion_tokens=2), account=ACCOUNT,
        ),
        bytes.fromhex(
            "de0008a26964a66a6f622d3137a7617474656d707400a57068617365aa61676772656761746564a6"
            "776f726b6572a27731a565706f63680ca4636f6465a473746f70a5757361676582ad70726f6d7074"
            "5f746f6b656e7304b1636f6d706c6574696f6e5f746f6b656e7302a76163636f756e7496a461636d"
            "65a23566a464656d6fa161a56261746368a463686174"
        ),
    ),
    (
        r.Started(
            id="job-17", attempt=0, phase="aggregated", worker="w1", epoch=12, run=7,
            origin=ORIGIN, responses_from=3, deadline_ms=9, account=ACCOUNT,
        ),
        bytes.fromhex(
            "8aa26964a66a6f622d3137a7617474656d707400a57068617365aa61676772656761746564a6776f"
            "726b6572a27731a565706f63680ca372756e07a66f726967696e83a5746f706963a8726571756573"
            "7473a9706172746974696f6e11a66f6666736574cd1267ae726573706f6e7365735f66726f6d03ab"
            "646561646c696e655f6d7309a76163636f756e7496a461636d65a23566a464656d6fa161a5626174"
            "6368a463686174"
        ),
    ),
    (r.Ended(id="job-17", code="queue_full", account=ACCOUNT), bytes.fromhex(
            "83a26964a66a6f622d3137a4636f6465aa71756575655f66756c6ca76163636f756e7496a461636d"
            "65a23566a464656d6fa161a56261746368a463686174"
        )),
    (
        r.RequestUsage(
            id="job-17", code="stop", ended_ms=1_700_000_000_000, tenant="acme", key_id="5f",
            model="demo", alias="chat", adapter="a", service_class="batch", prompt_tokens=9,
            cached_tokens=8, output_tokens=7, reasoning_tokens=6, recomputed_tokens=5, attempts=2,
            prefill_ms=4, decode_ms=3, workers=("w1", "w2"), unknown=("output_tokens",),
        ),
        (
            b'{"t":"RequestUsage","id":"job-17","code":"stop","ended_ms":17000000000'
            b'00,"tenant":"acme","key_id":"5f","model":"demo","alias":"chat","adapte'
            b'r":"a","service_class":"batch","prompt_tokens":9,"cached_tokens":8,"ou'
            b'tput_tokens":7,"reasoning_tokens":6,"recomputed_tokens":5,"attempts":2'
            b',"prefill_ms":4,"decode_ms":3,"workers":["w1","w2"],"unknown":["output'
            b'_tokens"]}'
        ),
    ),
    (
        r.Result(
            id="job-17", status="failed", status_code=400, error=r.ResultError(message="no",
            type="invalid_request_error", code="invalid"),
        ),
        (b'{"t":"Result","id":"job-17","status":"failed","status_code":400,"model":"","'
            b'kind":"chat","body":null,"usage":null,"error":{"message":"no","type":"invali'
            b'd_request_error","param":null,"code":"invalid"},"timings":{"queued_ms":0,"tt'
            b'ft_ms":null,"total_ms":0,"finished_ms":0},"attempts":0,"metadata":{},"batch_'
            b'id":"","custom_id":""}'),
    ),
    (
        r.Result(
            id="job-19", status="completed", status_code=200, kind="response",
            body={"object": "response"}, stored=r.StoredTurn(
            input=[{"role": "user", "content": "a"}], history=(TurnPlace("job-18", 1, 7),)),
        ),
        (b'{"t":"Result","id":"job-19","status":"completed","status_code":200,"model":"","kind":"'
            b'response","body":{"object":"response"},"usage":null,"error":null,"timings":{"queued_ms"'
            b':0,"ttft_ms":null,"total_ms":0,"finished_ms":0},"attempts":0,"metadata":{},"batch_id":'
            b'"","custom_id":"","stored":{"input":[{"role":"user","content":"a"}],"history":'
            b'[["job-18",1,7]]}}'),
    ),
    (
        q.Request(
            id="job-19", result=q.ResultOptions(stored=q.StoredInput(shown=b"{}", input=b"[]",
            history=(TurnPlace("job-18", 1, 7),), namespaces={"f": "n"})),
        ),
        bytes.fromhex(
            "de0002a26964a66a6f622d3139a6726573756c7481a673746f72656484a573686f776ec4027b7da5696e70"
            "7574c4025b5da7686973746f72799193a66a6f622d31380107aa6e616d6573706163657381a166a16e"
        ),
    ),
    (
        b.ResponseDeletion(id="job-19"),
        bytes.fromhex("81a26964a66a6f622d3139"),
    ),
    (
        b.ResponseDeletion(id="job-19", tenant="acme"),
        bytes.fromhex("82a26964a66a6f622d3139a674656e616e74a461636d65"),
    ),
    (
        r.Fence(id="job-17", attempt=1, reason="lost"),
        b'{"t":"Fence","id":"job-17","attempt":1,"reason":"lost"}',
    ),
    (
        r.End(
            id="job-17", code="queue_full", message="32 wait", retry_after_s=1.5, usage=r.Usage(),
        ),
        (b'{"t":"End","id":"job-17","code":"queue_full","message":"32 wait","retry_after_'
            b's":1.5,"usage":{}}'),
    ),
    (
        r.Assignment(
            worker="w1", epoch=12, attempt=1, phase="decode", request=q.Request(id="job-17"),
            origin=ORIGIN, responses_from=99, deadline_ms=1_700_000_030_000, budget_s=29.5,
            handoff_until_ms=1_700_000_001_000,
        ),
        bytes.fromhex(
            "8aa6776f726b6572a27731a565706f63680ca7617474656d707401a57068617365a66465636f6465a77265"
            "7175657374de0001a26964a66a6f622d3137a66f726967696e83a5746f706963a87265717565737473a970"
            "6172746974696f6e11a66f6666736574cd1267ae726573706f6e7365735f66726f6d63ab646561646c696e"
            "655f6d73cf0000018bcfe5dd30a86275646765745f73cb403d800000000000b068616e646f66665f756e74"
            "696c5f6d73cf0000018bcfe56be8"
        ),
    ),
    (
        r.Assignment(
            worker="w1", epoch=12, attempt=1, phase="aggregated", request=REQUEST, origin=ORIGIN,
            responses_from=99, deadline_ms=1_700_000_030_000, budget_s=29.5, rank=1,
            taken=pack_tokens([1, 2, 3]), taken_chars=3,
        ),
        bytes.fromhex(
            "8ca6776f726b6572a27731a565706f63680ca7617474656d707401a57068617365aa616767726567617465"
            "64a772657175657374de0009a26964a66a6f622d3137a56d6f64656ca464656d6fa9746f6b656e5f696473"
            "c41003010000680000006900000070110100a674656e616e74a461636d65aa646561646c696e655f73cb40"
            "3e000000000000ab72656365697665645f6d73cf0000018bcfe56800a473746f7085aa6d61785f746f6b65"
            "6e7320aa6d696e5f746f6b656e7301a473746f7091a10aae73746f705f746f6b656e5f69647391cd0100aa"
            "69676e6f72655f656f73c3a873616d706c696e67de0004ab74656d7065726174757265cb3fe00000000000"
            "00a5746f705f70cb3feccccccccccccda5746f705f6b28a47365656407a568696e747382b36261636b656e"
            "645f696e7374616e63655f6964a27731b2616c6c6f7765645f776f726b65725f69647392a27731a27732a6"
            "6f726967696e83a5746f706963a87265717565737473a9706172746974696f6e11a66f6666736574cd1267"
            "ae726573706f6e7365735f66726f6d63ab646561646c696e655f6d73cf0000018bcfe5dd30a86275646765"
            "745f73cb403d800000000000a472616e6b01a574616b656ec40c010000000200000003000000ab74616b65"
            "6e5f636861727303"
        ),
    ),
    (
        r.CancelRun(
            worker="w1", epoch=12, id="job-17", attempt=0, phase="aggregated", reason="fenced",
        ),
        bytes.fromhex(
            "86a6776f726b6572a27731a565706f63680ca26964a66a6f622d3137a7617474656d707400a57068617365"
            "aa61676772656761746564a6726561736f6ea666656e636564"
        ),
    ),
    (
        r.Lost(worker="w1", epoch=12, by="r1", silent_ms=5200),
        bytes.fromhex("84a6776f726b6572a27731a565706f63680ca26279a27231a973696c656e745f6d73cd1450"),
    ),
    (
        r.Blocks(
            worker="w1", epoch=12, first_event_id=5, rank=1, model="demo", hash_fingerprint="ab12",
            kinds=b"\x00\x01", tiers=b"\x00\x00", positions=b"\x00\x00\x00\x00\x02\x00\x00\x00",
            counts=b"\x01\x00\x00\x00\x01\x00\x00\x00", keys=bytes(range(16)),
        ),
        bytes.fromhex(
            "8ba6776f726b6572a27731a565706f63680cae66697273745f6576656e745f696405a472616e6b01a56d6f"
            "64656ca464656d6fb0686173685f66696e6765727072696e74a461623132a56b696e6473c4020001a57469"
            "657273c4020000a9706f736974696f6e73c4080000000002000000a6636f756e7473c40801000000010000"
            "00a46b657973c410000102030405060708090a0b0c0d0e0f"
        ),
    ),
    (
        r.Heartbeat(
            worker="w1", epoch=12, slot_offset=77, state="unhealthy", reason="engine",
            running=(r.RunProgress(id="job-17", attempt=1, phase="aggregated", output_tokens=5),),
            waiting=3,
        ),
        bytes.fromhex(
            "87a6776f726b6572a27731a565706f63680cab736c6f745f6f66667365744da57374617465a9756e686561"
            "6c746879a6726561736f6ea6656e67696e65a772756e6e696e679184a26964a66a6f622d3137a761747465"
            "6d707401a57068617365aa61676772656761746564ad6f75747075745f746f6b656e7305a777616974696e"
            "6703"
        ),
    ),
    (
        r.Heartbeat(
            worker="w1", epoch=12, slot_offset=77, last_event_ids=(4, -1),
            engine=r.EngineStats(running=2, waiting=1, kv_used_blocks=9, kv_total_blocks=16,
            steps=300),
        ),
        bytes.fromhex(
            "85a6776f726b6572a27731a565706f63680cab736c6f745f6f66667365744dae6c6173745f6576656e745f"
            "6964739204ffa6656e67696e6585a772756e6e696e6702a777616974696e6701ae6b765f757365645f626c"
            "6f636b7309af6b765f746f74616c5f626c6f636b7310a57374657073cd012c"
        ),
    ),
    (r.Probe(by="r1"), bytes.fromhex("81a26279a27231")),
    (
        QUEUED_REQUEST,
        bytes.fromhex(
            "de0005a26964a66a6f622d3137a97175657565645f6d73cf0000018bcfe56800ad736572766963655f636c"
            "617373a56261746368aa69735f72656e65776564c3a6726573756c7486a46b696e64aa636f6d706c657469"
            "6f6ea86d65746164617461c4077b2261223a317da862617463685f6964a762617463685f31a9637573746f"
            "6d5f6964a66c696e652d37a57265706c7983a5746f706963a77265706c696573a7686561646572739192ae"
            "636f7272656c6174696f6e5f6964c4020078a9706172746974696f6e03a46563686fa44f6e6365"
        ),
    ),
    (
        TRACED_REQUEST,
        bytes.fromhex(
            "de0002a26964a161ab7472616365706172656e74d93730302d313131313131313131313131313131313131"
            "31313131313131313131313131312d323232323232323232323232323232322d3031"
        ),
    ),
    (
        PARSED_REQUEST,
        bytes.fromhex(
            "de0002a26964a161a770617273696e6786a5746f6f6c73a66865726d6573a9726561736f6e696e67a57177"
            "656e33a776657273696f6e02ac696e5f726561736f6e696e67c3af73686f77735f726561736f6e696e67c2"
            "a96d61785f63616c6c7301"
        ),
    ),
    (
        RENEWED_REQUEST,
        bytes.fromhex(
            "de0003a26964a161aa69735f72656e65776564c3a573686f776ede0009a174a54368756e6ba26964a161a7"
            "617474656d707401a372756ea0a373657100a5696e64657800a9746f6b656e5f69647392ccf0cc9fa47465"
            "7874a178a5636861727301"
        ),
    ),
    (
        r.Fencing(
            id="job-17", attempt=1, reason="renewed", origin=ORIGIN, responses_from=7,
            deadline_ms=1_700_000_000_000,
        ),
        bytes.fromhex(
            "86a26964a66a6f622d3137a7617474656d707401a6726561736f6ea772656e65776564a66f726967696e83"
            "a5746f706963a87265717565737473a9706172746974696f6e11a66f6666736574cd1267ae726573706f6e"
            "7365735f66726f6d07ab646561646c696e655f6d73cf0000018bcfe56800"
        ),
    ),
    (
        r.Fence(id="job-17", attempt=1, reason="renewed", origin=41),
        b'{"t":"Fence","id":"job-17","attempt":1,"reason":"renewed","origin":41}',
    ),
    (
        r.RouterCapacity(
            router="r1", requests=5, tokens=1000, bytes=70_000, positions={0: 17, 31: 4},
            batch_requests=6,
        ),
        bytes.fromhex(
            "86a6726f75746572a27231a8726571756573747305a6746f6b656e73cd03e8a56279746573ce00011170a9"
            "706f736974696f6e738200111f04ae62617463685f726571756573747306"
        ),
    ),
    (
        r.RouterCapacity(
            router="r1",
            waits=r.ReportedWaits(
                reasons=("no worker is ready",), requests=(("a", 1_700_000_000_000, 0),),
                left_out=3,
            ),
        ),
        bytes.fromhex(
            "82a6726f75746572a27231a5776169747383a7726561736f6e7391b26e6f20776f726b6572206973207265"
            "616479a872657175657374739193a161cf0000018bcfe5680000a86c6566745f6f757403"
        ),
    ),
    (
        r.RouterCapacity(
            router="r1",
            routing=r.RoutingReport(
                own={"policy": "predictive"}, order=18, problem="it has format 2"
            ),
        ),
        bytes.fromhex(
            "82a6726f75746572a27231a7726f7574696e6783a36f776e81a6706f6c696379aa70726564696374697665"
            "a56f7264657212a770726f626c656daf69742068617320666f726d61742032"
        ),
    ),
    (
        r.LimitClaims(
            "g1-00ff", 7, {"acme": (2, 0, 4096, 3, 500)}, {"acme": (4, 1, 8192, 6, 1000)}
        ),
        bytes.fromhex(
            "84a767617465776179a767312d30306666a66e756d62657207a468656c6481a461636d65950200cd100003"
            "cd01f4a677616e74656481a461636d65950401cd200006cd03e8"
        ),
    ),
    (
        r.Assigned(
            id="job-17", attempt=0, phase="aggregated", worker="w1", epoch=40, origin=ORIGIN,
            responses_from=90, deadline_ms=1_700_000_030_000, lora_name="sql",
            session=r.SessionUse(id="s", timeout_s=60, closes=True, bound_worker="w2",
            bound_epoch=39, bound_rank=1),
        ),
        bytes.fromhex(
            "de000aa26964a66a6f622d3137a7617474656d707400a57068617365aa61676772656761746564a6776f72"
            "6b6572a27731a565706f636828a66f726967696e83a5746f706963a87265717565737473a9706172746974"
            "696f6e11a66f6666736574cd1267ae726573706f6e7365735f66726f6d5aab646561646c696e655f6d73cf"
            "0000018bcfe5dd30a773657373696f6e86a26964a173a974696d656f75745f733ca6636c6f736573c3ac62"
            "6f756e645f776f726b6572a27732ab626f756e645f65706f636827aa626f756e645f72616e6b01a96c6f72"
            "615f6e616d65a373716c"
        ),
    ),
    (
        r.Assigned(
            id="job-17", attempt=0, phase="aggregated", worker="w1", epoch=12, origin=ORIGIN,
            responses_from=99, deadline_ms=1_700_000_030_000, policy="predictive", block_size=16,
            candidate_rows=r.CandidateRows(places=(("w1", 12, 1), ("w2", 7, 0)),
            rows=CANDIDATE_ROWS, curves=((0.0, 0.5, 16.0, 0.0, 0.0, 8.0, 1.0), ()),
            taint_weights=(0.5, 0.0), ahead_ms={0: (20.5, 3.0)}, planned_ms={1: 90.5},
            is_timed=True),
        ),
        bytes.fromhex(
            "de000ba26964a66a6f622d3137a7617474656d707400a57068617365aa61676772656761746564a6776f"
            "726b6572a27731a565706f63680ca66f726967696e83a5746f706963a87265717565737473a970617274"
            "6974696f6e11a66f6666736574cd1267ae726573706f6e7365735f66726f6d63ab646561646c696e655f"
            "6d73cf0000018bcfe5dd30a6706f6c696379aa70726564696374697665aa626c6f636b5f73697a6510ae"
            "63616e6469646174655f726f777387a6706c616365739293a277310c0193a277320700a4726f7773c501"
            "00000000000000f83f02000000000000002c010000000000000400000000000000030000000000000002"
            "000000000000004000000000000000fa0000000000000001000000000000000010000000000000000001"
            "00000000000000000000002940000000000000f43f0000000000001440000000000000d03f0000000000"
            "001e4000000000000004400100000000000000c800000000000000000000000000000000000000000000"
            "000000000000000000000000000000000096000000000000000000000000000000001000000000000000"
            "000100000000000000000000000000000000000000f03f00000000000000000000000000000000000000"
            "0000000000a66375727665739297cb0000000000000000cb3fe0000000000000cb4030000000000000cb"
            "0000000000000000cb0000000000000000cb4020000000000000cb3ff000000000000090ad7461696e74"
            "5f7765696768747392cb3fe0000000000000cb0000000000000000a861686561645f6d73810092cb4034"
            "800000000000cb4008000000000000aa706c616e6e65645f6d738101cb4056a00000000000a869735f74"
            "696d6564c3"
        ),
    ),
    (
        r.Assigned(
            id="job-17", attempt=0, phase="aggregated", worker="w1", epoch=12, origin=ORIGIN,
            responses_from=99, deadline_ms=1_700_000_030_000, policy="predictive", block_size=16,
            candidate_rows=r.CandidateRows(places=(("w1", 12, 1), ("w2", 7, 0)),
            rows=CANDIDATE_ROWS, is_timed=True, shares_steps=True, joining_rows=JOINING_ROWS),
        ),
        bytes.fromhex(
            "de000ba26964a66a6f622d3137a7617474656d707400a57068617365aa61676772656761746564a6776f"
            "726b6572a27731a565706f63680ca66f726967696e83a5746f706963a87265717565737473a970617274"
            "6974696f6e11a66f6666736574cd1267ae726573706f6e7365735f66726f6d63ab646561646c696e655f"
            "6d73cf0000018bcfe5dd30a6706f6c696379aa70726564696374697665aa626c6f636b5f73697a6510ae"
            "63616e6469646174655f726f777385a6706c616365739293a277310c0193a277320700a4726f7773c501"
            "00000000000000f83f02000000000000002c010000000000000400000000000000030000000000000002"
            "000000000000004000000000000000fa0000000000000001000000000000000010000000000000000001"
            "00000000000000000000002940000000000000f43f0000000000001440000000000000d03f0000000000"
            "001e4000000000000004400100000000000000c800000000000000000000000000000000000000000000"
            "000000000000000000000000000000000096000000000000000000000000000000001000000000000000"
            "000100000000000000000000000000000000000000f03f00000000000000000000000000000000000000"
            "0000000000a869735f74696d6564c3ac7368617265735f7374657073c3ac6a6f696e696e675f726f7773"
            "c43078000000000000000200000000000000230000000000000000000000000000000000000000000000"
            "0000000000000000"
        ),
    ),
    (
        r.Assigned(
            id="job-17", attempt=0, phase="aggregated", worker="w1", epoch=12, origin=ORIGIN,
            responses_from=99, deadline_ms=1_700_000_030_000, policy="predictive", block_size=16,
            candidate_rows=r.CandidateRows(places=(("w1", 12, 1), ("w2", 7, 0)),
            rows=CANDIDATE_ROWS, is_timed=True, shares_steps=True, usual_tokens=(1050.5, 0.0)),
        ),
        bytes.fromhex(
            "de000ba26964a66a6f622d3137a7617474656d707400a57068617365aa61676772656761746564a6776f"
            "726b6572a27731a565706f63680ca66f726967696e83a5746f706963a87265717565737473a970617274"
            "6974696f6e11a66f6666736574cd1267ae726573706f6e7365735f66726f6d63ab646561646c696e655f"
            "6d73cf0000018bcfe5dd30a6706f6c696379aa70726564696374697665aa626c6f636b5f73697a6510ae"
            "63616e6469646174655f726f777385a6706c616365739293a277310c0193a277320700a4726f7773c501"
            "00000000000000f83f02000000000000002c010000000000000400000000000000030000000000000002"
            "000000000000004000000000000000fa0000000000000001000000000000000010000000000000000001"
            "00000000000000000000002940000000000000f43f0000000000001440000000000000d03f0000000000"
            "001e4000000000000004400100000000000000c800000000000000000000000000000000000000000000"
            "000000000000000000000000000000000096000000000000000000000000000000001000000000000000"
            "000100000000000000000000000000000000000000f03f00000000000000000000000000000000000000"
            "0000000000a869735f74696d6564c3ac7368617265735f7374657073c3ac757375616c5f746f6b656e73"
            "92cb40906a0000000000cb0000000000000000"
        ),
    ),
    (
        r.End(
            id="job-17", code="stop", placed=r.DryRunResult(worker_id="w1", dp_rank=1,
            token_ids=(259, 104)),
        ),
        (b'{"t":"End","id":"job-17","code":"stop","placed":{"worker_id":"w1","dp_rank":1,"token_'
            b'ids":[259,104]}}'),
    ),
    (
        r.Heartbeat(
            worker="w1", epoch=40, slot_offset=12, running=(r.RunProgress(id="job-17", attempt=0,
            phase="decode", output_tokens=5, expected_output_tokens=50),),
        ),
        bytes.fromhex(
            "84a6776f726b6572a27731a565706f636828ab736c6f745f6f66667365740ca772756e6e696e679185a269"
            "64a66a6f622d3137a7617474656d707400a57068617365a66465636f6465ad6f75747075745f746f6b656e"
            "7305b665787065637465645f6f75747075745f746f6b656e7332"
        ),
    ),
    (
        r.WorkerCard(
            id="w1", slot=3, model="demo", busy_cache=0.75, busy_prefill_tokens=8192,
            config=r.EngineConfig(model="demo", lora_names=("sql",), max_loras=2, kind="chat"),
        ),
        bytes.fromhex(
            "86a26964a27731a4736c6f7403a56d6f64656ca464656d6fa6636f6e666967de0004a56d6f64656ca46465"
            "6d6faa6c6f72615f6e616d657391a373716ca96d61785f6c6f72617302a46b696e64a463686174aa627573"
            "795f6361636865cb3fe8000000000000b3627573795f70726566696c6c5f746f6b656e73cd2000"
        ),
    ),
    (
        r.WorkerCard(
            id="w1", slot=9, model="demo", config=r.EngineConfig(model="demo",
            served_model_name="demo-8b", context_length=4096, kv_cache_block_size=16,
            total_kv_blocks=1000, max_num_seqs=64, max_num_batched_tokens=8192, bootstrap_host="h",
            bootstrap_port=9000, curve=(0.0, 0.5)), epoch=12, role="prefill", ranks=2,
            taints=("spot",), versions={"kvlane": "0.1"}, life="c0ffee",
        ),
        bytes.fromhex(
            "8aa26964a27731a4736c6f7409a56d6f64656ca464656d6fa6636f6e666967de000aa56d6f64656ca46465"
            "6d6fb17365727665645f6d6f64656c5f6e616d65a764656d6f2d3862ae636f6e746578745f6c656e677468"
            "cd1000b36b765f63616368655f626c6f636b5f73697a6510af746f74616c5f6b765f626c6f636b73cd03e8"
            "ac6d61785f6e756d5f7365717340b66d61785f6e756d5f626174636865645f746f6b656e73cd2000ae626f"
            "6f7473747261705f686f7374a168ae626f6f7473747261705f706f7274cd2328a5637572766592cb000000"
            "0000000000cb3fe0000000000000a565706f63680ca4726f6c65a770726566696c6ca572616e6b7302a674"
            "61696e747391a473706f74a876657273696f6e7381a66b766c616e65a3302e31a46c696665a66330666665"
            "65"
        ),
    ),
    (
        r.WorkerCard(
            id="w1", slot=3, model="demo",
            config=r.EngineConfig(model="demo", continues_guided=True),
        ),
        bytes.fromhex(
            "84a26964a27731a4736c6f7403a56d6f64656ca464656d6fa6636f6e666967de0002a56d6f64656ca464"
            "656d6fb0636f6e74696e7565735f677569646564c3"
        ),
    ),
    (
        r.WorkerCard(
            id="w1", slot=3, model="demo", role="decode", config=r.EngineConfig(model="demo",
            transfer_lease_s=2.0),
        ),
        bytes.fromhex(
            "85a26964a27731a4736c6f7403a56d6f64656ca464656d6fa6636f6e666967de0002a56d6f64656ca46465"
            "6d6fb07472616e736665725f6c656173655f73cb4000000000000000a4726f6c65a66465636f6465"
        ),
    ),
    (
        r.ModelCard(name="demo", kind="chat", context_length=4096, block_size=16),
        bytes.fromhex(
            "84a46e616d65a464656d6fa46b696e64a463686174ae636f6e746578745f6c656e677468cd1000aa626c6f"
            "636b5f73697a6510"
        ),
    ),
    (
        r.ModelCard(
            name="demo", tokenizer=r.Artifact(sha256="ab", size=7), template=r.Artifact(sha256="cd",
            size=8), special_tokens={"eos_token": "<e>"}, eos_token_ids=(0, 1),
            defaults=q.SamplingOptions(temperature=0.5), checksum="ef", served_as="m",
        ),
        bytes.fromhex(
            "88a46e616d65a464656d6fa9746f6b656e697a657282a6736861323536a26162a473697a6507a874656d70"
            "6c61746582a6736861323536a26364a473697a6508ae7370656369616c5f746f6b656e7381a9656f735f74"
            "6f6b656ea33c653ead656f735f746f6b656e5f696473920001a864656661756c7473de0001ab74656d7065"
            "726174757265cb3fe0000000000000a8636865636b73756da26566a97365727665645f6173a16d"
        ),
    ),
    (
        r.SnapshotPointer(
            view="index", partition=3, position=500, first_part=40, parts=2, checksum="aa",
            state_hash="bb", format=2,
        ),
        bytes.fromhex(
            "88a4666f6c64a5696e646578a9706172746974696f6e03a8706f736974696f6ecd01f4aa66697273745f70"
            "61727428a5706172747302a8636865636b73756da26161aa73746174655f68617368a26262a6666f726d61"
            "7402"
        ),
    ),
    (
        r.Deployment(lanes=32, partitions={"prompts": 16}, format=2),
        bytes.fromhex("83a56c616e657320aa706172746974696f6e7381a770726f6d70747310a6666f726d617402"),
    ),
    (
        r.Skip(topic="ledger", partition=3, offset=17),
        bytes.fromhex("83a5746f706963a66c6564676572a9706172746974696f6e03a66f666673657411"),
    ),
    (
        r.Cordon(worker="w1", evacuates=True),
        bytes.fromhex("82a6776f726b6572a27731a9657661637561746573c3"),
    ),
    (
        r.ModelAlias(
            name="chat",
            targets=(r.AliasTarget(model="a", weight=9), r.AliasTarget(model="b")),
        ),
        bytes.fromhex("82a46e616d65a463686174a7746172676574739282a56d6f64656ca161a67765696768740981a56d6f64656ca162"),
    ),
    (
        r.RoutingOrder(
            settings={
                "policy": "dynamo", "session_affinity_tolerance": 0.2,
                "queue_classes": {"a": {"weight": 2.0}},
            },
            format=2,
        ),
        bytes.fromhex(
            "82a873657474696e677383a6706f6c696379a664796e616d6fba73657373696f6e5f616666696e6974795f"
            "746f6c6572616e6365cb3fc999999999999aad71756575655f636c617373657381a16181a6776569676874"
            "cb4000000000000000a6666f726d617402"
        ),
    ),
    (
        b.FileCard(
            id="file-1", purpose="batch_output", partition=3, first=17, end=20, size=2000001,
            sha256="ab", created_s=1700000000, filename="out.jsonl", tenant="acme",
        ),
        bytes.fromhex(
            "8aa26964a666696c652d31a7707572706f7365ac62617463685f6f7574707574a9706172746974696f6e03"
            "a5666972737411a3656e6414a473697a65ce001e8481a6736861323536a26162a9637265617465645f73ce"
            "6553f100a866696c656e616d65a96f75742e6a736f6e6ca674656e616e74a461636d65"
        ),
    ),
    (
        b.BatchJob(
            id="batch_1", endpoint="/v1/embeddings", input_file_id="file-1", created_s=1700000000,
            window_s=5400, completion_window="90m", tenant="acme", cache_salt="cd",
            metadata={"job": "nightly"}, status="expired", fence=40, outputs_from=17,
            results_from={0: 5, 1: 9}, lines=10, published=8, completed=6, failed=4,
            errors=(b.BatchError(code="c", message="m", line=3, param="p"),),
            output_file_id="file-1-output", error_file_id="file-1-errors",
            in_progress_s=1700000001, finalizing_s=1700000002, ended_s=1700000003, key_id="5f",
        ),
        bytes.fromhex(
            "de0018a26964a762617463685f31a8656e64706f696e74ae2f76312f656d62656464696e6773ad696e7075"
            "745f66696c655f6964a666696c652d31a9637265617465645f73ce6553f100a877696e646f775f73cd1518"
            "b1636f6d706c6574696f6e5f77696e646f77a339306da674656e616e74a461636d65aa63616368655f7361"
            "6c74a26364a86d6574616461746181a36a6f62a76e696768746c79a6737461747573a765787069726564a5"
            "66656e636528ac6f7574707574735f66726f6d11ac726573756c74735f66726f6d8200050109a56c696e65"
            "730aa97075626c697368656408a9636f6d706c6574656406a66661696c656404a66572726f72739184a463"
            "6f6465a163a76d657373616765a16da46c696e6503a5706172616da170ae6f75747075745f66696c655f69"
            "64ad66696c652d312d6f7574707574ad6572726f725f66696c655f6964ad66696c652d312d6572726f7273"
            "ad696e5f70726f67726573735f73ce6553f101ac66696e616c697a696e675f73ce6553f102a7656e646564"
            "5f73ce6553f103a66b65795f6964a23566"
        ),
    ),
    (
        b.BatchCancel(id="batch_1", at_s=1700000000),
        bytes.fromhex("82a26964a762617463685f31a461745f73ce6553f100"),
    ),
]
# fmt: on
